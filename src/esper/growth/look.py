"""The promise of every blueprint in every slot of a model, measured before anything is planted."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.config.arguments import describe_value
from esper.errors import LookError, plural
from esper.files import write_atomically
from esper.growth.blueprints.registry import LayerCall, get
from esper.growth.hooks import list_named_modules
from esper.growth.promise import GradientBatch, measure_gram, measure_promise, record_call, summarise_grams
from esper.growth.slot import Slot, eval_without_side_effects
from esper.growth.summary import align_columns

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

# The heat map, in pixels and in red, green and blue.
_CELL_WIDTH, _CELL_HEIGHT, _TOP, _LETTER = 64, 26, 30, 8
_LIGHT, _DARK = (240, 246, 255), (8, 48, 107)


@dataclass(frozen=True)
class Candidate:
    """A possible module: a blueprint in a slot, with its promise and cost."""

    slot: str
    blueprint: str
    promise: float
    """Fraction of a uniform decrease of all examples' losses that one step would achieve, in [0, 1); see
    `esper.growth.promise`."""
    promise_held_out: float
    """Promise on examples the step was not fitted on; about zero or below if it would only fit noise."""
    error: float
    """Standard error of ``promise_held_out`` over draws of the initial values and halves of the examples."""
    parameters: int
    """Number of scalars."""
    flops: int
    """FLOPs added to a forward pass of one example, a multiply-add counted as two."""
    resident: str | None
    """Blueprint of the seed in an occupied slot, after which the candidate is measured; None if the slot is free."""

    @property
    def promise_per_parameter(self) -> float:
        """Promise per thousand parameters."""
        return self.promise / self.parameters * 1000


@dataclass(frozen=True)
class LayerNeed:
    """Promise of a host layer's own parameters; high if the layer still has much to learn and can learn it."""

    layer: str
    kind: str
    """Name of the layer's class."""
    promise: float
    """Promise of a step of the layer's parameters; the figures are those of a `Candidate`."""
    promise_held_out: float
    error: float
    parameters: int
    """Number of scalars, whether they require a gradient or not."""


@dataclass(frozen=True, repr=False)
class Look:
    """Promises of all candidates. Prints as a table, in notebooks also as a heat map."""

    rows: tuple[Candidate, ...]
    """Candidates, most promising first."""
    slots: tuple[str, ...]
    """Slots in the order of the forward pass."""
    layers: tuple[LayerNeed, ...]
    """The host's own layers in the order of their calls; empty without ``layers=True``."""
    examples: int
    """Number of examples."""
    loss: float
    """Mean loss of the examples."""

    def __repr__(self) -> str:
        # A row per candidate, and below a row per layer.
        figures = ("promise", "held out", "error", "parameters")
        rows: list[tuple[str, ...]] = [("slot", "blueprint", *figures, "FLOPs", "promise/1k")]
        for row in self.rows:
            slot = row.slot if row.resident is None else f"{row.slot} (behind {row.resident})"
            costs = f"{row.flops:,}", f"{row.promise_per_parameter:.3f}"
            rows.append((slot, row.blueprint, *_format_figures(row), *costs))
        parts = [align_columns(rows, numbers_from=2)]
        if self.layers:
            needs = [(need.layer, need.kind, *_format_figures(need)) for need in self.layers]
            parts.append(align_columns([("layer of the host", "class", *figures), *needs], numbers_from=2))
        return "\n\n".join([*parts, f"{self.examples} examples, mean loss {self.loss:.4g}"])

    def _repr_html_(self) -> str:
        return f"<div>{self._draw_svg()}<pre>{html.escape(repr(self))}</pre></div>"

    def to_svg(self, path: str | Path) -> None:
        """Write an SVG heat map of ``promise_held_out``: slots across, blueprints down, darker is higher.

        Raises:
            RunError: the file cannot be written.
        """
        write_atomically(Path(path), self._draw_svg().encode())

    def _draw_svg(self) -> str:
        slots, blueprints = list(self.slots), sorted({row.blueprint for row in self.rows})
        # Room for the names of slots, which are turned by 30 degrees, and of blueprints.
        name_width = _LETTER * max(map(len, slots), default=0)
        left = max(_LETTER * max(map(len, blueprints), default=0), name_width) + 10
        bottom = _TOP + _CELL_HEIGHT * len(blueprints) + 14
        width, height = left + _CELL_WIDTH * len(slots) + 10, bottom + name_width // 2 + 6
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12" text-anchor="middle">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{left + _CELL_WIDTH * len(slots) // 2}" y="18">held-out promise</text>',
        ]
        for index, name in enumerate(blueprints):
            y = _TOP + _CELL_HEIGHT * index + 17
            lines.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{html.escape(name)}</text>')
        for index, name in enumerate(slots):
            x = left + _CELL_WIDTH * index + _CELL_WIDTH // 2
            turned = f'text-anchor="end" transform="rotate(-30 {x} {bottom})"'
            lines.append(f'<text x="{x}" y="{bottom}" {turned}>{html.escape(name)}</text>')
        # The cells, from a light blue for nothing or less to a dark one for everything.
        for row in self.rows:
            x = left + _CELL_WIDTH * slots.index(row.slot)
            y = _TOP + _CELL_HEIGHT * blueprints.index(row.blueprint)
            share = min(row.promise_held_out, 1.0) if row.promise_held_out > 0 else 0.0
            fill = ",".join(f"{light + share * (dark - light):.0f}" for light, dark in zip(_LIGHT, _DARK, strict=True))
            lines += [
                f'<rect x="{x}" y="{y}" width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}" fill="rgb({fill})"/>',
                f'<text x="{x + _CELL_WIDTH // 2}" y="{y + 17}" fill="{"white" if share > 0.4 else "black"}">'
                f"{row.promise_held_out:.2f}</text>",
            ]
        return "\n".join([*lines, "</svg>"])


def _format_figures(row: Candidate | LayerNeed) -> tuple[str, ...]:
    return f"{row.promise:.3f}", f"{row.promise_held_out:+.3f}", f"{row.error:.3f}", f"{row.parameters:,}"


def look(
    model: GrowingModel,
    loss: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    *,
    examples: int,
    draws: int,
    layers: bool,
    seed: int,
) -> Look:
    """Measure every available blueprint in every slot of ``model``; see `GrowingModel.look`."""
    host_layers: dict[str, nn.Module] = {}
    if layers:
        host_layers = {
            name: module
            for name, module in list_named_modules(model.host)
            if name and not list(module.children()) and list(module.parameters())
        }
    recorded: dict[nn.Module, list[GradientBatch]] = {
        module: [] for module in (*model.slots.values(), *host_layers.values())
    }
    calls: list[tuple[nn.Module, GradientBatch, Tensor]] = []
    """Of the current pass, with zeros that were added to the outputs, frozen or not, to get their gradients."""

    def add_zeros(module: nn.Module, call: GradientBatch, output: Tensor) -> Tensor:
        calls.append((module, call, torch.zeros_like(call.gradients, requires_grad=True)))
        return output + calls[-1][2]

    def record_slot(slot: Slot, call: LayerCall, features: Tensor) -> Tensor:
        if not features.is_floating_point() or features.is_nested:
            return features
        return add_zeros(slot, record_call(slot, call, features), features)

    def record_layer(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        tensors = tuple(argument.detach() for argument in arguments if isinstance(argument, Tensor))
        usable = isinstance(output, Tensor) and output.is_floating_point() and tensors
        if not usable or len(tensors) < len(arguments):
            return output
        return add_zeros(module, GradientBatch(tensors, output.detach()), output)

    with eval_without_side_effects(model), ExitStack() as stack:
        # Record features and functional gradients, after the slots and at the host's own layers.
        for slot in model.slots.values():
            slot.feature_hook = record_slot
            stack.callback(setattr, slot, "feature_hook", None)
        for module in host_layers.values():
            stack.callback(module.register_forward_hook(record_layer, prepend=True).remove)
        seen, total = 0, 0.0
        for batch in batches:
            losses = loss(model, batch)
            leaves = [leaf for *_, leaf in calls]
            sizes = [len(leaf) for module, _, leaf in calls if isinstance(module, Slot)]
            count = sizes[0] if sizes else 0
            if sizes and not count:
                raise LookError("a batch is empty: remove empty batches")
            # The gradient of the sum has each example's own functional gradient in its row.
            summed = _sum_losses(losses, count)
            gradients = torch.autograd.grad(summed, leaves, materialize_grads=True)
            # Modules that did not run once on all examples, batch first, are left out.
            for module in list(recorded):
                found = [
                    call._replace(gradients=gradient)
                    for (called, call, _), gradient in zip(calls, gradients, strict=True)
                    if called is module
                ]
                if len(found) == 1 and len(found[0].gradients) == count:
                    recorded[module] += found
                else:
                    del recorded[module]
            calls.clear()
            seen, total = seen + count, total + float(summed.detach())
            if seen >= examples:
                break
        if seen < 2:
            raise LookError(
                f"batches held {plural(seen, 'example')}: give two or more, in batches that loss(model, batch) takes"
            )
        stack.close()

        # Measure the candidates, and the host's own layers without what grew on them.
        rows: list[Candidate] = []
        stack.enter_context(torch.autocast(model.slots.values()[0].like.device.type, enabled=False))
        for index, slot in enumerate(model.slots.values()):
            if slot not in recorded:
                raise LookError(
                    f"submodule {slot.name!r} did not run exactly once, batch first, per call of "
                    "loss(model, batch): call the whole model once in the loss function"
                )
            keys = [(seed, index, draw) for draw in range(draws)]
            resident = None if slot.seed is None else slot.seed.blueprint.name
            for kind in map(get, slot.blueprints):
                figures = measure_promise(slot, kind, recorded[slot], keys)
                rows.append(Candidate(slot.name, kind.name, *figures, *kind.cost_at(slot.site), resident))
        for slot in model.slots.values():
            stack.enter_context(slot.disabled())
        needs: list[LayerNeed] = []
        for name, module in host_layers.items():
            if module in recorded:
                kind = type(module).__name__
                gram = measure_gram(f"layer {name!r} ({kind})", module, recorded[module], "look without layers=True")
                parameters = sum(parameter.numel() for parameter in module.parameters())
                needs.append(LayerNeed(name, kind, *summarise_grams([gram]), parameters))
    rows.sort(key=lambda row: (-row.promise, row.slot, row.blueprint))
    return Look(tuple(rows), tuple(model.slots), tuple(needs), seen, total / seen)


def _sum_losses(losses: Any, count: int) -> Tensor:
    """The sum of a user's loss over the ``count`` examples of a batch."""
    if not isinstance(losses, Tensor):
        raise LookError(
            f"loss(model, batch) returned {describe_value(losses)}: return a tensor [B], the loss of each example"
        )
    if not count:
        raise LookError("loss(model, batch) called no module with a slot: call the whole model passed to it")
    if losses.shape != (count,):
        examples = plural(count, "example")
        raise LookError(
            f"loss(model, batch) returned shape {tuple(losses.shape)} for a batch of {examples}: return "
            f"[{count}], the loss of each example (reduction='none'; of a sequence the mean over its tokens), or where "
            f"there is only a mean over them, mean.expand({count})"
        )
    if losses.is_complex():
        raise LookError(f"loss(model, batch) returned {losses.dtype}: return real numbers, such as its absolute value")
    if not losses.requires_grad:
        raise LookError("the result of loss(model, batch) has no gradient: remove detach() and no_grad()")
    if not bool(losses.isfinite().all()):
        raise LookError("loss(model, batch) is not finite: look at the model before it diverges")
    return losses.sum()
