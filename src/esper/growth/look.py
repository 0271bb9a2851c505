"""Where would a model grow, and by what? `look` measures what every blueprint promises in every slot."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from esper.errors import LookError
from esper.files import write_atomically
from esper.growth.blueprints.registry import Blueprint, Context, LayerCall, get
from esper.growth.promise import GradientBatch, compute_held_out_promise, gram_of, promise
from esper.growth.side_pass import FeatureRecorder, RecordedGradients, ask, quietly
from esper.growth.slot import Slot
from esper.growth.summary import align_columns
from esper.numerics.random_streams import module_generator


@dataclass(frozen=True)
class Candidate:
    """A module that does not exist yet: a blueprint in a slot."""

    slot: str
    blueprint: str
    promise: float
    """Share of what the examples ask for that one step of it would grant, in [0, 1): `esper.growth.promise`."""
    promise_held_out: float
    """The same for examples that the step was not fitted on; about zero or below where it would only fit noise."""
    error: float
    """Standard error of ``promise_held_out`` over draws of the initial values and halves of the examples."""
    parameters: int
    """Scalars."""
    flops: int
    """FLOPs added to a forward pass of one example, a multiply-add counted as two."""
    resident: str | None
    """Blueprint of the seed that lives in the slot; the candidate would come behind it. None if the slot is free."""

    @property
    def promise_per_parameter(self) -> float:
        """Promise by a thousand parameters."""
        return self.promise / self.parameters * 1000


@dataclass(frozen=True)
class LayerNeed:
    """A layer of the host: what its own parameters could still grant. Much in one that learns well is left to learn."""

    layer: str
    kind: str
    """Name of its class."""
    promise: float
    promise_held_out: float
    error: float
    """Standard error, as a `Candidate`'s."""
    parameters: int
    """Scalars that require a gradient or not."""


@dataclass(frozen=True, repr=False)
class Look:
    """What was seen; as text a table, in a notebook with a map."""

    rows: tuple[Candidate, ...]
    """The most promising first."""
    slots: tuple[str, ...]
    """Slots in the order of the forward pass."""
    layers: tuple[LayerNeed, ...]
    """The host's own layers in the order of their calls, if they were asked for."""
    examples: int
    """Number of examples that were looked at."""
    loss: float
    """Their mean loss."""

    def __repr__(self) -> str:
        titles = ("slot", "blueprint", "promise", "held out", "error", "parameters", "FLOPs", "promise/1k")
        rows = [
            (
                one.slot if one.resident is None else f"{one.slot} (behind {one.resident})",
                one.blueprint,
                *_figures(one),
                f"{one.flops:,}",
                f"{one.promise_per_parameter:.3f}",
            )
            for one in self.rows
        ]
        parts = [align_columns([titles, *rows], numbers_from=2)]
        if self.layers:
            titles = ("layer of the host", "class", "promise", "held out", "error", "parameters")
            needs = [(one.layer, one.kind, *_figures(one)) for one in self.layers]
            parts.append(align_columns([titles, *needs], numbers_from=2))
        return "\n\n".join([*parts, f"{self.examples} examples, mean loss {self.loss:.4g}"])

    def _repr_html_(self) -> str:
        return f"<div>{self._draw()}<pre>{html.escape(repr(self))}</pre></div>"

    def to_svg(self, path: str | Path) -> None:
        """Write a map of ``promise_held_out``: slots across, blueprints down, darker where more is promised.

        Raises:
            RunError: the file cannot be written.
        """
        write_atomically(Path(path), self._draw().encode())

    def _draw(self) -> str:
        slots = list(self.slots)
        blueprints = sorted({one.blueprint for one in self.rows})
        cells = {(one.slot, one.blueprint): one.promise_held_out for one in self.rows}
        figure = Figure(figsize=(1.8 + 0.75 * len(slots), 1.3 + 0.32 * len(blueprints)), layout="constrained")
        axes = figure.add_subplot()
        values = [[cells.get((slot, blueprint), math.nan) for slot in slots] for blueprint in blueprints]
        axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (slot, blueprint), value in cells.items():
            place = slots.index(slot), blueprints.index(blueprint)
            axes.text(*place, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black")
        axes.set_xticks(range(len(slots)), slots, rotation=30, ha="right")
        axes.set_yticks(range(len(blueprints)), blueprints)
        axes.set_title("held-out promise", fontsize=10)
        file = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()[file.getvalue().index("<svg") :]


def look(
    model: nn.Module,
    host: nn.Module,
    slots: Mapping[str, Slot],
    loss: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    *,
    examples: int,
    draws: int,
    layers: bool,
    seed: int,
) -> Look:
    """As `esper.GrowingModel.look` says, of a model around ``host`` with ``slots`` on it."""
    parts = _find_layers(host) if layers else {}
    inputs: list[Tensor] = []
    tap = next(iter(slots.values())).tap
    with quietly(model):
        places = FeatureRecorder({name: host.get_submodule(name) for name in slots}, first=False, arguments=False)
        own = FeatureRecorder(parts, first=True, arguments=True)
        try:
            measured = ask(model, (places, own), loss, batches, examples, lambda: inputs.append(tap.inputs.detach()))
        finally:
            places.remove()
            own.remove()
        with torch.autocast(tap.inputs.device.type, enabled=False):
            rows = [
                measure_promise(
                    slot, get(name), _require_asked(places, slot.name), inputs, [(seed, at, n) for n in range(draws)]
                )
                for at, slot in enumerate(slots.values())
                for name in slot.blueprints
            ]
            with ExitStack() as bare:
                for slot in slots.values():
                    bare.enter_context(slot.disabled())
                needs = [_need_of(name, parts[name], asked) for name, asked in own.asked.items() if asked.gradients]
    rows.sort(key=lambda one: (-one.promise, one.slot, one.blueprint))
    return Look(tuple(rows), tuple(slots), tuple(needs), measured.examples, measured.loss)


def measure_promise(
    slot: Slot,
    kind: type[Blueprint],
    asked: RecordedGradients,
    inputs: Sequence[Tensor],
    draws: Sequence[tuple[int, int, int]],
) -> Candidate:
    """What a blueprint promises in a slot by what was ``asked`` there of a network with these ``inputs``.

    Mean over the draws; one is enough where nothing is drawn. Autocast is to be off.

    Raises:
        LookError: the blueprint does not work under ``vmap``.
    """
    others = _find_others(slot, kind, asked, inputs)
    batches = [
        GradientBatch((raise_precision(features), raise_precision(other)), raise_precision(wishes))
        for features, other, wishes in zip(asked.features, others, asked.gradients, strict=True)
    ]
    like = batches[0].wishes
    grams: list[Tensor] = []
    drawn: list[list[Tensor]] = []
    for draw in draws:
        newborn: nn.Module = kind(slot.site, module_generator(*draw)).to(like.device, like.dtype)
        newborn = _CalledAlone(newborn) if kind.context is Context.CALL else newborn
        values = [parameter.detach() for parameter in newborn.parameters()]
        if drawn and all(map(torch.equal, values, drawn[0])):
            break
        drawn.append(values)
        grams.append(_require_gram(f"blueprint {kind.name!r}", newborn, batches, "offer others"))
    site, seed_there = slot.site, slot.seed
    return Candidate(
        slot.name,
        kind.name,
        *_summarise(torch.stack(grams)),
        kind.parameters_at(site),
        kind.flops_at(site),
        None if seed_there is None else seed_there.blueprint.name,
    )


def _find_others(
    slot: Slot, kind: type[Blueprint], asked: RecordedGradients, inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """What the blueprint reads beside the features, batch by batch; the features themselves, if nothing."""
    match kind.context:
        case Context.NETWORK:
            return inputs
        case Context.LAYER:
            others = asked.firsts
        case Context.CALL:
            others = asked.features if asked.alone else []
        case Context.NOTHING:
            return asked.features
    if len(others) < len(asked.features):
        raise LookError(
            f"blueprint {kind.name!r} in slot {slot.name!r}: the layer there is called with more than its features, so "
            "what it promises cannot be measured: offer others, or take a controller that does not look"
        )
    return others


class _CalledAlone(nn.Module):
    """A blueprint that reads the layer's call, of which nothing is known but the features that it is to be given."""

    def __init__(self, newborn: nn.Module) -> None:
        super().__init__()
        self.newborn = newborn

    def forward(self, features: Tensor, _: Tensor) -> Tensor:
        contribution: Tensor = self.newborn(features, LayerCall((features,), {}))
        return contribution


def _need_of(name: str, layer: nn.Module, asked: RecordedGradients) -> LayerNeed:
    batches = [
        GradientBatch(tuple(map(raise_precision, arguments)), raise_precision(wishes))
        for arguments, wishes in zip(asked.arguments, asked.gradients, strict=True)
    ]
    gram = _require_gram(f"layer {name!r} ({type(layer).__name__})", layer, batches, "look without layers=True")
    figures = _summarise(gram.unsqueeze(0))
    return LayerNeed(name, type(layer).__name__, *figures, sum(one.numel() for one in layer.parameters()))


def _require_gram(what: str, module: nn.Module, batches: Sequence[GradientBatch], remedy: str) -> Tensor:
    """As `gram_of`.

    Raises:
        LookError: the module does not work under ``vmap``.
    """
    try:
        return gram_of(module, batches)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise LookError(f"{what} cannot be differentiated example by example ({reason}): {remedy}") from error


def _summarise(grams: Tensor) -> tuple[float, float, float]:
    """Promise, held-out promise and the standard error of that, from ``[draws, N, N]``."""
    grams = grams.detach()
    held_out = compute_held_out_promise(grams).flatten()
    return float(promise(grams).mean()), float(held_out.mean()), float(held_out.std() / held_out.numel() ** 0.5)


def raise_precision(values: Tensor) -> Tensor:
    """Half precision as float32: a Gram matrix wants it. Indices stay what they are."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize else values


def _require_asked(places: FeatureRecorder, name: str) -> Asked:
    if name not in places.asked:
        raise LookError(
            f"submodule {name!r} did not run once per call of loss(model, batch) with the batch first: call the model "
            "once there, as a whole"
        )
    return places.asked[name]


def _find_layers(host: nn.Module) -> dict[str, nn.Module]:
    """Modules with parameters and no submodules."""
    named = cast(Iterator[tuple[str, nn.Module]], host.named_modules())
    return {
        name: module for name, module in named if name and not list(module.children()) and list(module.parameters())
    }


def _figures(one: Candidate | LayerNeed) -> tuple[str, str, str, str]:
    return f"{one.promise:.3f}", f"{one.promise_held_out:+.3f}", f"{one.error:.3f}", f"{one.parameters:,}"
