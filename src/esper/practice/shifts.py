"""How data may change after a host has learned them, and a host's adaptation to such data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.adaptation.adapt import adapt
from esper.adaptation.report import Adaptation
from esper.errors import ConfigError, did_you_mean
from esper.growth.attach import attach
from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.side_pass import keep_modes
from esper.practice.training import PROBED, HostTraining
from esper.tasks.practice.examples import Minibatch, Splits
from esper.tasks.practice.registry import get_host

LAYER_BLUEPRINT, BLOCK_BLUEPRINT = "lora_4", "block_copy"
BATCH = 50
"""New examples in a batch."""
NOISE = 1.0
"""Standard deviation, where inputs are normalised."""


def _add_noise(inputs: Tensor, generator: torch.Generator) -> Tensor:
    return inputs + NOISE * torch.randn(inputs.shape, generator=generator).to(inputs)


def _invert(inputs: Tensor, _: torch.Generator) -> Tensor:
    return -inputs


def _turn(inputs: Tensor, _: torch.Generator) -> Tensor:
    """Images by a quarter, signals by time."""
    return inputs.rot90(1, (-2, -1)) if inputs.dim() > 3 else inputs.flip(-1)


def _cycle(labels: Tensor, classes: int) -> Tensor:
    return (labels + 1) % classes


def _merge(labels: Tensor, _: int) -> Tensor:
    return labels // 2


INPUT_SHIFTS: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "noise": _add_noise,
    "inversion": _invert,
    "rotation": _turn,
}
"""Each batch is given the same generator, as it was left by the batch before."""
LABEL_SHIFTS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "cycled": _cycle,
    "merged": _merge,
}


def find_shift(name: str, classes: int, generator: torch.Generator) -> Callable[[Minibatch], Minibatch]:
    """What the shift of that name makes of a minibatch; whatever is random about it is drawn from ``generator``.

    Raises:
        ConfigError: there is none.
    """
    if name in INPUT_SHIFTS:
        return lambda batch: Minibatch(INPUT_SHIFTS[name](batch.inputs, generator), batch.targets)
    if name in LABEL_SHIFTS:
        return lambda batch: Minibatch(batch.inputs, LABEL_SHIFTS[name](batch.targets, classes))
    names = [*INPUT_SHIFTS, *LABEL_SHIFTS]
    raise ConfigError(f"no shift is called {name!r}: choose from {', '.join(names)}{did_you_mean(name, names)}")


@dataclass(frozen=True)
class ChangedData:
    """Batches of what a host has not learned."""

    new: list[Minibatch]
    """To adapt to."""
    test: list[Minibatch]
    """To judge by."""
    old: list[Minibatch]
    """Of the host's task, as they were, which it has not learned either: to tell whether it is forgotten."""


@dataclass(frozen=True)
class ShiftResult:
    """How a host does on data that have changed."""

    adaptation: Adaptation
    host_accuracy: float
    """Of the host on changed test data."""
    accuracy: float
    """With what grew."""


def change_data(splits: Splits, shift: str, examples: int, *, protected: bool = False) -> ChangedData:
    """So many of the validation examples, and all test examples, after the shift of that name.

    If the task is to be ``protected``, as many of the other validation examples stay as they are, or as there are.

    Raises:
        ConfigError: there is no such shift, there are too few examples for two batches or more than there are, or they
            are text; or less than two batches are left to protect.
    """
    if examples <= BATCH:
        raise ConfigError(f"examples is {examples}: give more than {BATCH}, which go to a batch; two are needed")
    change = find_shift(shift, splits.classes, torch.Generator().manual_seed(0))
    spare, count = splits.validation.in_order(BATCH), -(-examples // BATCH)
    learned = list(islice(spare, count))
    if not learned[0].inputs.is_floating_point():
        raise ConfigError("this task is text: its data change in none of these ways, which are for images and signals")
    there = len(splits.validation)
    if there < examples:
        raise ConfigError(f"examples is {examples}, but the task has no more than {there} to spare")
    old = list(islice(spare, count)) if protected else []
    if protected and len(old) < 2:
        raise ConfigError(
            f"examples is {examples} of {there} that the task has to spare, and too few are left to tell what the host "
            f"forgets: give {there - 2 * BATCH} at most, or protect nothing"
        )
    return ChangedData(
        [change(batch) for batch in learned], [change(batch) for batch in splits.test.in_order(BATCH)], old
    )


def adapt_to_shift(
    training: HostTraining, data: ChangedData, *, tolerance: float | None, seconds: float | None
) -> ShiftResult:
    """Adapt a host whose training is over.

    Args:
        training: Its own.
        data: What has changed, and what has not.
        tolerance: By which share the loss may rise on the old data; None, where there are none: by any.
        seconds: As for `esper.adapt`.

    Raises:
        ConfigError: as `esper.adapt`.
    """
    settings = training.settings
    host = copy.deepcopy(training.model).finalize("drop").eval()
    inputs = data.new[0].inputs
    model = attach(host, offer_everywhere(host, settings.host, inputs), inputs[:PROBED], freeze_host=True)
    before = measure_accuracy(model, data.test)
    found = adapt(
        model,
        classify,
        data.new,
        score=lambda model, batch: measure_accuracy(model, [batch]),
        source=data.old or None,
        tolerance=tolerance,
        seconds=seconds,
        seed=settings.seed,
    )
    return ShiftResult(found, before, measure_accuracy(model, data.test))


def offer_everywhere(host: nn.Module, kind: str, inputs: Tensor) -> dict[str, list[str]]:
    """Low-rank updates of every layer that has them; behind blocks their copies and what that kind of host offers."""
    modules = cast("Iterator[tuple[str, nn.Module]]", host.named_modules())
    layers = [name for name, part in modules if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]
    wanted = dict.fromkeys(layers, (LAYER_BLUEPRINT,))
    wanted |= dict.fromkeys(get_host(kind).sites, (*get_host(kind).blueprints, BLOCK_BLUEPRINT))
    sites = {slot.name: slot.site for slot in attach(copy.deepcopy(host), list(wanted), inputs[:PROBED]).slots.values()}
    served = {place: [name for name in wanted[place] if get(name).serves(site)] for place, site in sites.items()}
    return {place: offers for place, offers in served.items() if offers}


def classify(model: GrowingModel, batch: Minibatch) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(model(batch.inputs), batch.targets)


@torch.no_grad()
def measure_accuracy(model: nn.Module, batches: Iterable[Minibatch]) -> float:
    """Fraction that is right in evaluation mode, in [0, 1]; the model stays in its own."""
    right, count = 0, 0
    with keep_modes(model):
        model.eval()
        for batch in batches:
            right += int((model(batch.inputs).argmax(1) == batch.targets).sum())
            count += len(batch.targets)
    return right / count
