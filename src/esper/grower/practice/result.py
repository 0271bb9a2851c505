"""What came out of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from esper.errors import RunError
from esper.files import write_atomically
from esper.grower.measuring import Score
from esper.grower.practice.growth import Growth
from esper.grower.practice.record import FLOPS, LEARNING_SECONDS, SECONDS, total
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Op
from esper.telemetry.events import RolledBack, StepTaken
from esper.telemetry.store import RunStore


@dataclass(frozen=True)
class Kept:
    """A seed that is part of the model."""

    slot: str
    blueprint: str
    parameters: int


@dataclass(frozen=True)
class Choice:
    """A decision other than to wait."""

    epoch: int
    op: str
    slot: str | None
    blueprint: str | None


@dataclass(frozen=True)
class Result:
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
    """Of host, seeds and forks, three forward passes for every example learned from; measurements are not counted."""
    learning_seconds: float
    """Of the epochs alone, in all processes that worked at the run."""
    seconds: float
    """Of these, measurements on validation data and decisions."""
    rollbacks: int
    kept: tuple[Kept, ...]
    choices: tuple[Choice, ...]


_RESULT = TypeAdapter(Result)


def concluded(growth: Growth, test: Score, store: RunStore) -> Result:
    """What came out: ``test`` is the committed model's score."""
    settings, host, added = growth.settings, growth.model.host_parameters, growth.added_parameters
    return Result(
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
        training_flops=int(total(store, FLOPS)),
        learning_seconds=total(store, LEARNING_SECONDS),
        seconds=total(store, SECONDS),
        rollbacks=len(store.events(RolledBack)),
        kept=_kept(growth.model),
        choices=_choices(store, list(growth.model.slots)),
    )


def write_result(result: Result, path: Path) -> None:
    """As JSON, whole or not at all."""
    write_atomically(path, _RESULT.dump_json(result, indent=2) + b"\n")


def read_result(path: Path) -> Result:
    """A result that was written.

    Raises:
        RunError: it is missing or damaged.
    """
    try:
        return _RESULT.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunError(f"{path} holds no result of `esper grow`: delete it, and resume the run") from error


def _kept(model: GrowingModel) -> tuple[Kept, ...]:
    return tuple(
        Kept(name, seed.blueprint.name, sum(parameter.numel() for parameter in seed.parameters()))
        for name, seed in model.seeds.items()
    )


def _choices(store: RunStore, slots: list[str]) -> tuple[Choice, ...]:
    return tuple(
        Choice(step.iteration, step.op, None if step.slot is None else slots[step.slot], step.blueprint)
        for step in store.events(StepTaken)
        if step.op != Op.WAIT.name.lower()
    )
