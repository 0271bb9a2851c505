"""What came out of a run, and the scalars of its store that the totals are the sums of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from esper.errors import RunError
from esper.files import write_atomically
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Op
from esper.practice.training import ClassifierScore, Epoch, HostTraining
from esper.runs.events import RolledBack, StepTaken
from esper.runs.store import RunStore

FLOPS, LEARNING_SECONDS, SECONDS = "training_flops", "learning_seconds", "seconds"


def epoch_scalars(epoch: Epoch) -> dict[str, float]:
    """What an epoch cost, by scalar."""
    return {FLOPS: epoch.training_flops, LEARNING_SECONDS: epoch.learning_seconds, SECONDS: epoch.seconds}


@dataclass(frozen=True)
class KeptSeed:
    """A seed that is part of the model."""

    slot: str
    blueprint: str
    parameters: int


@dataclass(frozen=True)
class GrowthDecision:
    """A decision other than to wait."""

    epoch: int
    op: str
    slot: str | None
    blueprint: str | None


@dataclass(frozen=True)
class GrowResult:
    """A finished run; loss, accuracy and score are of the host with its fossils on test data."""

    task: str
    host: str
    controller: str
    seed: int
    epochs: int
    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Fraction that is right, in [0, 1]."""
    score: float
    """``accuracy - rent * log1p(added parameters / host parameters)``."""
    rent: float
    host_parameters: int
    added_parameters: int
    training_flops: int
    """For host, seeds and forks, three forward passes for every example learned from; measurements are not counted."""
    learning_seconds: float
    """Spent on the epochs alone, in all processes that worked at the run."""
    seconds: float
    """Spent on these, measurements on validation data and decisions."""
    rollbacks: int
    kept: tuple[KeptSeed, ...]
    choices: tuple[GrowthDecision, ...]


_RESULT = TypeAdapter(GrowResult)


def summarise_run(training: HostTraining, test: ClassifierScore, store: RunStore) -> GrowResult:
    """What came out: ``test`` is the committed model's score."""
    settings, host, added = training.settings, training.model.host_parameters, training.model.added_parameters

    def total(scalar: str) -> float:
        return sum(value for _, value in store.series(scalar))

    return GrowResult(
        task=settings.task,
        host=settings.host,
        controller=settings.controller,
        seed=settings.seed,
        epochs=settings.epochs,
        loss=test.loss,
        accuracy=test.accuracy,
        score=test.accuracy - settings.rent * math.log1p(added / host),
        rent=settings.rent,
        host_parameters=host,
        added_parameters=added,
        training_flops=int(total(FLOPS)),
        learning_seconds=total(LEARNING_SECONDS),
        seconds=total(SECONDS),
        rollbacks=len(store.events(RolledBack)),
        kept=_list_kept(training.model),
        choices=_choices(store, list(training.model.slots)),
    )


def write_result(result: GrowResult, path: Path) -> None:
    """Write it as JSON, whole or not at all."""
    write_atomically(path, _RESULT.dump_json(result, indent=2) + b"\n")


def read_result(path: Path) -> GrowResult:
    """A result that was written.

    Raises:
        RunError: it is missing or damaged.
    """
    try:
        return _RESULT.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunError(f"{path} holds no result of `esper grow`: delete it, and resume the run") from error


def _list_kept(model: GrowingModel) -> tuple[KeptSeed, ...]:
    return tuple(KeptSeed(name, seed.blueprint.name, seed.parameter_count) for name, seed in model.seeds.items())


def _choices(store: RunStore, slots: list[str]) -> tuple[GrowthDecision, ...]:
    return tuple(
        GrowthDecision(step.iteration, step.op, None if step.slot is None else slots[step.slot], step.blueprint)
        for step in store.events(StepTaken)
        if step.op != Op.WAIT.name.lower()
    )
