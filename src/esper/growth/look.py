"""The promise of every blueprint in every slot of a model, measured before anything is planted."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from esper.config.arguments import describe_value
from esper.errors import LookError, plural
from esper.files import write_atomically
from esper.growth.blueprints.registry import Blueprint, Context, LayerCall, get
from esper.growth.hooks import list_named_modules
from esper.growth.promise import (
    GradientBatch,
    RecordedCall,
    compute_gram_matrix,
    compute_held_out_promise,
    compute_promise,
    record_call,
)
from esper.growth.slot import Slot, eval_without_side_effects
from esper.growth.summary import align_columns
from esper.numerics.random_streams import module_generator

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
    """Promise of a step of the layer's parameters, as `Candidate.promise`."""
    promise_held_out: float
    """Promise on examples that the step was not fitted on, as `Candidate.promise_held_out`."""
    error: float
    """Standard error of ``promise_held_out``, as `Candidate.error`."""
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
        titles = ("slot", "blueprint", "promise", "held out", "error", "parameters", "FLOPs", "promise/1k")
        rows = [
            (
                row.slot if row.resident is None else f"{row.slot} (behind {row.resident})",
                row.blueprint,
                f"{row.promise:.3f}",
                f"{row.promise_held_out:+.3f}",
                f"{row.error:.3f}",
                f"{row.parameters:,}",
                f"{row.flops:,}",
                f"{row.promise_per_parameter:.3f}",
            )
            for row in self.rows
        ]
        parts = [align_columns([titles, *rows], numbers_from=2)]
        if self.layers:
            titles = ("layer of the host", "class", "promise", "held out", "error", "parameters")
            rows = [
                (
                    need.layer,
                    need.kind,
                    f"{need.promise:.3f}",
                    f"{need.promise_held_out:+.3f}",
                    f"{need.error:.3f}",
                    f"{need.parameters:,}",
                )
                for need in self.layers
            ]
            parts.append(align_columns([titles, *rows], numbers_from=2))
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


Call = TypeVar("Call", RecordedCall, GradientBatch)


class _Recorder(Generic[Call]):
    """Records calls of modules; zeros that are added to their outputs get the gradients, frozen or not."""

    def __init__(self, names: Iterable[str]) -> None:
        self.recorded: dict[str, list[Call]] = {name: [] for name in names}
        self._pass: dict[str, list[tuple[Call, Tensor]]] = {name: [] for name in self.recorded}

    def add(self, name: str, call: Call) -> Tensor:
        """Record a call of the module ``name``, and return the zeros to add to its output."""
        leaf = torch.zeros_like(call.gradients, requires_grad=True)
        self._pass[name].append((call, leaf))
        return leaf

    def list_leaves(self) -> list[Tensor]:
        """The zeros of all calls in the current pass."""
        return [leaf for calls in self._pass.values() for _, leaf in calls]

    def end_pass(self, gradients: Iterator[Tensor | None], examples: int) -> None:
        """Store the gradients of `list_leaves`; drop modules that did not run once on all examples, batch first."""
        for name, calls in self._pass.items():
            found = [(call, leaf, next(gradients)) for call, leaf in calls]
            if len(found) != 1 or len(found[0][1]) != examples:
                self.recorded.pop(name, None)
            elif name in self.recorded:
                call, leaf, gradient = found[0]
                gradient = torch.zeros_like(leaf) if gradient is None else gradient
                self.recorded[name].append(call._replace(gradients=gradient))
            calls.clear()


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
    host, slots = model.host, dict(model.slots.items())
    host_layers: dict[str, nn.Module] = {}
    if layers:
        host_layers = {
            name: module
            for name, module in list_named_modules(host)
            if name and not list(module.children()) and list(module.parameters())
        }
    at_slots, at_layers = _Recorder[RecordedCall](slots), _Recorder[GradientBatch](host_layers)

    def record_slot(slot: Slot, call: LayerCall, features: Tensor) -> Tensor:
        if not features.is_floating_point() or features.is_nested:
            return features
        return features + at_slots.add(slot.name, record_call(slot, call, features))

    def record_layer(name: str, _: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        tensors = tuple(argument.detach() for argument in arguments if isinstance(argument, Tensor))
        usable = isinstance(output, Tensor) and output.is_floating_point() and tensors
        if not usable or len(tensors) < len(arguments):
            return output
        return output + at_layers.add(name, GradientBatch(tensors, output.detach()))

    with eval_without_side_effects(model), ExitStack() as stack:
        # Record features and functional gradients, after the slots and at the host's own layers.
        for slot in slots.values():
            slot.feature_hook = record_slot
            stack.callback(setattr, slot, "feature_hook", None)
        for name, module in host_layers.items():
            hook = module.register_forward_hook(partial(record_layer, name), prepend=True)
            stack.callback(hook.remove)
        seen, total = 0, 0.0
        for batch in batches:
            losses = loss(model, batch)
            leaves = at_slots.list_leaves() + at_layers.list_leaves()
            count = len(leaves[0]) if leaves else 0
            if leaves and not count:
                raise LookError("a batch is empty: remove empty batches")
            # The gradient of the sum has each example's own functional gradient in its row.
            summed = _sum_losses(losses, count)
            gradients = iter(torch.autograd.grad(summed, leaves, allow_unused=True))
            at_slots.end_pass(gradients, count)
            at_layers.end_pass(gradients, count)
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
        stack.enter_context(torch.autocast(model.input_hook.get_inputs().device.type, enabled=False))
        for index, slot in enumerate(slots.values()):
            if slot.name not in at_slots.recorded:
                raise LookError(
                    f"submodule {slot.name!r} did not run exactly once, batch first, per call of "
                    "loss(model, batch): call the whole model once in the loss function"
                )
            keys = [(seed, index, draw) for draw in range(draws)]
            rows += [measure_promise(slot, get(name), at_slots.recorded[slot.name], keys) for name in slot.blueprints]
        for slot in slots.values():
            stack.enter_context(slot.disabled())
        needs = [_measure_layer(name, host_layers[name], calls) for name, calls in at_layers.recorded.items()]
    rows.sort(key=lambda row: (-row.promise, row.slot, row.blueprint))
    return Look(tuple(rows), tuple(slots), tuple(needs), seen, total / seen)


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


def measure_promise(
    slot: Slot, kind: type[Blueprint], calls: Sequence[RecordedCall], draws: Sequence[tuple[int, int, int]]
) -> Candidate:
    """The promise of a blueprint in a slot, as the mean over draws of its initial values. Autocast must be off.

    Args:
        slot: Where the blueprint would germinate.
        kind: The blueprint.
        calls: Features and functional gradients after the slot, batch by batch.
        draws: Keys of random streams, one per draw; only the first is used if the blueprint draws nothing.
    """
    if any(kind.context not in call.contexts for call in calls):
        reason = "the layer there takes more arguments than its features"
        if kind.context is Context.NETWORK:
            reason = "the network's input was not recorded"
        raise LookError(
            f"the promise of blueprint {kind.name!r} in slot {slot.name!r} cannot be measured, because {reason}: "
            "remove the blueprint, or use a controller without promises"
        )
    batches = [GradientBatch((call.features, call.contexts[kind.context]), call.gradients) for call in calls]
    # One Gram matrix per draw of the initial values.
    like = raise_precision(calls[0].gradients)
    grams: list[Tensor] = []
    first_values: list[Tensor] = []
    for draw in draws:
        newborn: nn.Module = kind(slot.site, module_generator(*draw)).to(like.device, like.dtype).eval()
        newborn = _FeaturesOnlyCall(newborn) if kind.context is Context.CALL else newborn
        values = [parameter.detach() for parameter in newborn.parameters()]
        if grams and all(map(torch.equal, values, first_values)):
            break  # the initial values are not random
        first_values = first_values or values
        grams.append(_compute_gram(f"blueprint {kind.name!r}", newborn, batches, "offer others"))
    resident = None if slot.seed is None else slot.seed.blueprint.name
    costs = kind.parameters_at(slot.site), kind.flops_at(slot.site)
    return Candidate(slot.name, kind.name, *_summarise_grams(torch.stack(grams)), *costs, resident)


class _FeaturesOnlyCall(nn.Module):
    """A blueprint with the context `Context.CALL`, for a layer that is called with only its features."""

    def __init__(self, newborn: nn.Module) -> None:
        super().__init__()
        self.newborn = newborn

    def forward(self, features: Tensor, _: Tensor) -> Tensor:
        contribution: Tensor = self.newborn(features, LayerCall((features,), {}))
        return contribution


def _measure_layer(name: str, layer: nn.Module, calls: Sequence[GradientBatch]) -> LayerNeed:
    """The promise of a host's layer, for a step of its parameters from their current values."""
    kind = type(layer).__name__
    gram = _compute_gram(f"layer {name!r} ({kind})", layer, calls, "look without layers=True")
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    return LayerNeed(name, kind, *_summarise_grams(gram.unsqueeze(0)), parameters)


def _compute_gram(what: str, module: nn.Module, batches: Sequence[GradientBatch], remedy: str) -> Tensor:
    """`compute_gram_matrix` in at least single precision; a LookError if ``module`` does not work under ``vmap``."""
    precise = [
        GradientBatch(tuple(map(raise_precision, inputs)), raise_precision(gradients)) for inputs, gradients in batches
    ]
    try:
        return compute_gram_matrix(module, precise)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise LookError(f"{what} cannot be differentiated example by example ({reason}): {remedy}") from error


def _summarise_grams(grams: Tensor) -> tuple[float, float, float]:
    """Promise, held-out promise and its standard error, from ``[draws, N, N]``."""
    grams = grams.detach()
    # Each half of each draw is a sample of the held-out promise.
    held_out = compute_held_out_promise(grams).flatten()
    error = float(held_out.std() / held_out.numel() ** 0.5)
    return float(compute_promise(grams).mean()), float(held_out.mean()), error


def raise_precision(values: Tensor) -> Tensor:
    """Half precision as float32, which a Gram matrix needs; other types, such as indices, are returned as they are."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize else values
