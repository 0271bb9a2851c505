"""Which settings train well? A sweep's space, its trials with a run directory each, and their ranking.

A space has settings shared by all trials, a grid of some, and draws of others. A sweep that was stopped goes on; trials
that are done are only read.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Self, cast
from zlib import crc32

import numpy as np
from pydantic import Field, model_validator

from esper.config.loading import load_settings, merge, override_of, put, validate_settings
from esper.config.settings import Settings
from esper.errors import ConfigError
from esper.files import write_atomically
from esper.lab.contest import train_and_play
from esper.numerics.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.train.collect import require_start
from esper.train.iteration import Iteration
from esper.train.results import ArmResults
from esper.train.settings import TrainSettings
from esper.train.trainer import report_iterations
from esper.train.workers import DeviceTask, LocalWorkers, Workers

BASE = "base"
DRAWS = 8
"""Draws of the random settings, unless another number is asked for."""


class Range(Settings):
    """Numbers to draw from, each as likely as any other."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    """The largest; the smallest and the largest may be drawn, too."""
    log: bool = False
    """Whether all orders of magnitude are equally likely, instead of all numbers."""
    int: bool = False
    """Whether only integers are drawn."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range must begin above 0, not at {self.low:g}")
        if self.int and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"{self.low:g} to {self.high:g} are no integers")
        return self

    def draw(self, rng: np.random.Generator) -> float:
        """One of the numbers."""
        half = 0.5 if self.int else 0.0  # so that both ends are as likely as other integers
        low, high = self.low - half, self.high + half
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        value = min(max(value, self.low), self.high)  # rounding may leave the range
        return round(value) if self.int else value


class _File(Settings):
    """What the YAML file holds."""

    base: dict[str, Any] = {}
    grid: dict[str, Any] = {}
    random: dict[str, Any] = {}


@dataclass(frozen=True)
class SweepTrial:
    """A choice of settings, by dotted key, and all settings that follow from it."""

    name: str
    choices: Mapping[str, Any]
    settings: TrainSettings


@dataclass(frozen=True)
class Space:
    """What trials have in common, and what they choose from, by dotted key."""

    source: Path
    base: Mapping[str, Any]
    grid: Mapping[str, list[Any]]
    random: Mapping[str, Range | list[Any]]
    overrides: Sequence[str] = ()
    """``dotted.key=value``, which ``base`` holds already."""

    @property
    def points(self) -> int:
        """Points of the grid."""
        return math.prod(len(values) for values in self.grid.values())

    def trials(self, draws: int | None, seed: int) -> list[SweepTrial]:
        """Every draw at every point of the grid; more draws later leave the first ones as they are.

        Raises:
            ConfigError: there is nothing to draw, or a choice makes settings that cannot be.
        """
        if draws is not None and not self.random:
            raise ConfigError(f"{self.source} has no `random` to draw from: leave --trials out")
        count = (DRAWS if draws is None else draws) if self.random else 1
        if count < 1:
            raise ConfigError(f"--trials {count}: ask for at least 1")
        points = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        drawn = [{key: _draw(key, self.random[key], seed, draw) for key in self.random} for draw in range(count)]
        chosen = [{**point, **draw} for draw in drawn for point in points]
        return [self._trial(f"trial-{number:03}", choices) for number, choices in enumerate(chosen)]

    def _trial(self, name: str, choices: Mapping[str, Any]) -> SweepTrial:
        values = dict(self.base)
        for key, value in choices.items():
            put(TrainSettings, values, key, value, f"{self.source}: {self.part(key)}: `{key}`")

        def source(key: str) -> str:
            if key:
                part, override = self.part(key), override_of(key, self.overrides)
                overridden = part == BASE and override is not None
                return f"--set {override}: " if overridden else f"{self.source}: {part}: "
            words = ", ".join(f"{chosen} {value}" for chosen, value in choices.items())
            return f"{self.source}: {name} ({words}): "

        return SweepTrial(name, choices, validate_settings(TrainSettings, values, source))

    def part(self, key: str) -> str:
        """The part of the file that a dotted key, or what is below it, comes from."""
        for part, chosen in (("grid", self.grid), ("random", self.random)):
            if any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in chosen):
                return part
        return BASE


def load_space(path: Path, overrides: Sequence[str] = ()) -> Space:
    """Read a space from a YAML file, and put ``dotted.key=value`` overrides in its base.

    Raises:
        ConfigError: unreadable file, YAML mistake, unknown key, nothing to choose from, or an override of a choice.
    """
    file = load_settings(_File, path)
    both = sorted(file.grid.keys() & file.random.keys())
    if both:
        raise ConfigError(f"{path}: `{both[0]}` is in `grid` and in `random`: leave it in one of them")
    if not file.grid and not file.random:
        raise ConfigError(f"{path} has nothing to try: give `grid`, `random` or both")
    grid = {key: _values(value, f"{path}: grid: `{key}`", "a list of values") for key, value in file.grid.items()}
    random = {key: _choice(value, f"{path}: random: `{key}`") for key, value in file.random.items()}
    base = dict(file.base)
    for override in overrides:
        merge(TrainSettings, base, override)
    space = Space(path, base, grid, random, overrides)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if space.part(key) != BASE:
            raise ConfigError(f"--set {override}: `{key}` is in `{space.part(key)}` of {path}: leave it in one of them")
    return space


def _choice(value: Any, source: str) -> Range | list[Any]:
    if isinstance(value, dict):
        return validate_settings(Range, cast("dict[str, Any]", value), lambda _: f"{source}: ")
    return _values(value, source, "a list of values, or low and high")


def _values(value: Any, source: str, wanted: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{source} must be {wanted}, not {value!r}")
    return cast("list[Any]", value)


def _draw(key: str, choice: Range | list[Any], seed: int, draw: int) -> Any:
    """The draw of that number; it depends on nothing else that is drawn."""
    rng = numpy_generator(seed, crc32(key.encode()), draw)
    return choice[rng.integers(len(choice))] if isinstance(choice, list) else choice.draw(rng)


RANKING = "sweep.json"
WHAT = "esper sweep"
"""Who holds a trial's directory."""
CAUTION = (
    "One training seed per trial proves nothing: the first of many is partly the luckiest. "
    "`esper compare` trains the best ones with several seeds and says which is better, if any."
)


class TrialProgress(NamedTuple):
    """The trial of that number has done so many iterations."""

    number: int
    done: int
    iteration: Iteration | None
    """The newest one; None: whoever worked at the trial before has done it."""


@dataclass(frozen=True)
class RankedTrial:
    """What a trial came to: means over the held-out instances."""

    trial: str
    choices: Mapping[str, Any]
    score: float
    accuracy: float
    """On test data."""
    added: float
    """Parameters over the host's."""


@dataclass(frozen=True)
class Sweep:
    """Trials on one suite, and the number of held-out instances that every policy plays."""

    folder: Path
    trials: Sequence[SweepTrial]
    instances: int

    def __post_init__(self) -> None:
        suites = sorted({trial.settings.suite for trial in self.trials})
        if len(suites) > 1:
            raise ConfigError(f"the trials train on different suites ({', '.join(suites)}): they cannot be ranked")

    @property
    def ranking(self) -> Path:
        """The file of what is finished, best first."""
        return self.folder / RANKING

    def path(self, trial: SweepTrial) -> Path:
        """The trial's run directory."""
        return self.folder / trial.name


@dataclass(frozen=True)
class _TrialTask(DeviceTask):
    number: int
    path: Path
    settings: TrainSettings
    instances: Sequence[Instance]

    @property
    def device(self) -> str:
        return self.settings.devices[0]


def run_sweep(
    sweep: Sweep,
    workers: Workers,
    hear: Callable[[TrialProgress], None],
    conclude: Callable[[int, RankedTrial], None],
) -> list[RankedTrial]:
    """All trials, best first; each computes in one process, whatever its shards.

    Raises:
        ConfigError: the folder holds trials of other settings.
        RunError: it cannot be written, or a worker process died.
    """
    for trial in sweep.trials:
        require_start(trial.settings)
    suite = get_suite(sweep.trials[0].settings.suite)
    instances = suite.sample(sweep.instances, "heldout", numpy_generator(Stream.SWEPT_INSTANCES))
    tasks = [
        _TrialTask(number, sweep.path(trial), trial.settings, instances) for number, trial in enumerate(sweep.trials)
    ]
    ranking: list[RankedTrial] = []
    for number, results in workers.as_completed(_compute_trial, tasks):
        hear(TrialProgress(number, sweep.trials[number].settings.iterations, None))
        ranked = _rank_trial(sweep.trials[number], results)
        conclude(number, ranked)
        ranking = sorted([*ranking, ranked], key=lambda one: (-one.score, one.trial))
        record = {
            "trials": len(sweep.trials),
            "finished": len(ranking),
            "instances": sweep.instances,
            "caution": CAUTION,
            "ranking": [asdict(one) for one in ranking],
        }
        write_atomically(sweep.ranking, json.dumps(record, indent=1))
    return ranking


def _compute_trial(task: _TrialTask) -> ArmResults:
    with LocalWorkers(1) as workers:
        work = train_and_play(task.path, task.settings, task.instances, workers, WHAT)
        return report_iterations(work, lambda _: None)


def _rank_trial(trial: SweepTrial, results: ArmResults) -> RankedTrial:
    outcomes = results.outcomes
    return RankedTrial(
        trial.name,
        trial.choices,
        mean(one.score for one in outcomes),
        mean(one.test_accuracy for one in outcomes),
        mean(one.growth for one in outcomes),
    )
