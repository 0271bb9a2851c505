"""The promise of every blueprint in every slot of a model, measured before anything is planted."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.errors import LookError
from esper.files import write_atomically
from esper.growth.blueprints.registry import Blueprint, Context, LayerCall, get
from esper.growth.promise import GradientBatch, compute_gram_matrix, compute_held_out_promise, compute_promise
from esper.growth.side_pass import FeatureRecorder, RecordedGradients, eval_without_side_effects, record_gradients
from esper.growth.slot import Slot
from esper.growth.summary import align_columns
from esper.growth.taps import list_named_modules
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
    inputs: list[Tensor] = []
    tap = model.tap
    with eval_without_side_effects(model):
        # Record features and functional gradients, after the slots and at the host's own layers.
        modules = {name: host.get_submodule(name) for name in slots}
        at_slots = FeatureRecorder(modules, first=False, arguments=False)
        at_layers = FeatureRecorder(host_layers, first=True, arguments=True)
        first_layers = {name: host.get_submodule(slot.chain[0]) for name, slot in slots.items() if slot.chain}
        at_sources = FeatureRecorder(first_layers, first=False, arguments=False)
        try:
            seen, mean_loss = record_gradients(
                model,
                (at_slots, at_layers, at_sources),
                loss,
                batches,
                examples,
                lambda: inputs.append(tap.get_inputs().detach()),
            )
        finally:
            at_slots.remove()
            at_layers.remove()
            at_sources.remove()
        with torch.autocast(tap.get_inputs().device.type, enabled=False):
            # Measure the candidates.
            rows: list[Candidate] = []
            for index, slot in enumerate(slots.values()):
                if slot.name not in at_slots.records:
                    raise LookError(
                        f"submodule {slot.name!r} did not run exactly once, batch first, per call of "
                        "loss(model, batch): call the whole model once in the loss function"
                    )
                record = at_slots.records[slot.name]
                if slot.name in at_sources.records:
                    record.sources = at_sources.records[slot.name].first_arguments
                keys = [(seed, index, draw) for draw in range(draws)]
                rows += [measure_promise(slot, get(name), record, inputs, keys) for name in slot.blueprints]
            # Measure the host's own layers, without what grew on them.
            with ExitStack() as stack:
                for slot in slots.values():
                    stack.enter_context(slot.disabled())
                needs = [
                    _measure_layer(name, host_layers[name], record)
                    for name, record in at_layers.records.items()
                    if record.gradients
                ]
    rows.sort(key=lambda row: (-row.promise, row.slot, row.blueprint))
    return Look(tuple(rows), tuple(slots), tuple(needs), seen, mean_loss)


def measure_promise(
    slot: Slot,
    kind: type[Blueprint],
    record: RecordedGradients,
    inputs: Sequence[Tensor],
    draws: Sequence[tuple[int, int, int]],
) -> Candidate:
    """The promise of a blueprint in a slot, as the mean over draws of its initial values. Autocast must be off.

    Args:
        slot: Where the blueprint would germinate.
        kind: The blueprint.
        record: Features and functional gradients after the slot.
        inputs: The network's inputs, batch by batch.
        draws: Keys of random streams, one per draw; only the first is used if the blueprint draws nothing.
    """
    # The newborn's arguments and the functional gradients, batch by batch.
    contexts = _find_contexts(slot, kind, record, inputs)
    batches = [
        GradientBatch((raise_precision(features), raise_precision(context)), raise_precision(gradients))
        for features, context, gradients in zip(record.features, contexts, record.gradients, strict=True)
    ]
    # One Gram matrix per draw of the initial values.
    like = batches[0].gradients
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
    promise, held_out, error = _summarise_grams(torch.stack(grams))
    return Candidate(
        slot=slot.name,
        blueprint=kind.name,
        promise=promise,
        promise_held_out=held_out,
        error=error,
        parameters=kind.parameters_at(slot.site),
        flops=kind.flops_at(slot.site),
        resident=None if slot.seed is None else slot.seed.blueprint.name,
    )


def _find_contexts(
    slot: Slot, kind: type[Blueprint], record: RecordedGradients, inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The second argument of the blueprint, batch by batch; the features again if it has no context."""
    match kind.context:
        case Context.NETWORK:
            return inputs
        case Context.LAYER:
            contexts = record.first_arguments
        case Context.CALL:
            contexts = record.features if record.single_argument else []
        case Context.HIDDEN:
            contexts = record.sources
        case Context.NOTHING:
            return record.features
    # Calls without a first tensor, or with further arguments, were not recorded as such.
    if len(contexts) < len(record.features):
        raise LookError(
            f"the promise of blueprint {kind.name!r} in slot {slot.name!r} cannot be measured, because the layer there "
            "takes more arguments than its features: remove the blueprint, or use a controller without promises"
        )
    return contexts


class _FeaturesOnlyCall(nn.Module):
    """A blueprint with the context `Context.CALL`, for a layer that is called with only its features."""

    def __init__(self, newborn: nn.Module) -> None:
        super().__init__()
        self.newborn = newborn

    def forward(self, features: Tensor, _: Tensor) -> Tensor:
        contribution: Tensor = self.newborn(features, LayerCall((features,), {}))
        return contribution


def _measure_layer(name: str, layer: nn.Module, record: RecordedGradients) -> LayerNeed:
    """The promise of a host's layer, for a step of its parameters from their current values."""
    batches = [
        GradientBatch(tuple(map(raise_precision, arguments)), raise_precision(gradients))
        for arguments, gradients in zip(record.arguments, record.gradients, strict=True)
    ]
    gram = _compute_gram(f"layer {name!r} ({type(layer).__name__})", layer, batches, "look without layers=True")
    promise, held_out, error = _summarise_grams(gram.unsqueeze(0))
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    return LayerNeed(name, type(layer).__name__, promise, held_out, error, parameters)


def _compute_gram(what: str, module: nn.Module, batches: Sequence[GradientBatch], remedy: str) -> Tensor:
    """`compute_gram_matrix` with a LookError, if ``module`` does not work under ``vmap``."""
    try:
        return compute_gram_matrix(module, batches)
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
