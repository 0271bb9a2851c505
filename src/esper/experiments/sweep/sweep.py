"""Compute the trials of a sweep, and rank them. Stopped, it goes on; trials that are done are only read."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from esper.errors import ConfigError
from esper.experiments.arms.outcome import Outcome
from esper.experiments.compare.judged_run import JudgedRun
from esper.experiments.iteration import Iteration
from esper.experiments.placement import Placed
from esper.experiments.sweep.space import Trial
from esper.experiments.workers import LocalWorkers, Workers
from esper.files import write_atomically
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

WHAT = "esper sweep"
"""Who holds a trial's directory."""
CAUTION = (
    "One training seed per trial proves nothing: the first of many is partly the luckiest. "
    "`esper compare` trains the best ones with several seeds and says which is better, if any."
)
_STREAM = 24
"""Keeps the instances of sweeps apart from all others: what chose a trial must not judge it in `esper compare`, too."""


class Told(NamedTuple):
    """The trial of that number has done so many iterations."""

    number: int
    done: int
    iteration: Iteration | None
    """The newest one; None: whoever worked at the trial before has done it."""


@dataclass(frozen=True)
class Ranked:
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
    trials: Sequence[Trial]
    instances: int

    def __post_init__(self) -> None:
        suites = sorted({trial.settings.suite for trial in self.trials})
        if len(suites) > 1:
            raise ConfigError(f"the trials train on different suites ({', '.join(suites)}): they cannot be ranked")

    @property
    def ranking(self) -> Path:
        """The file of what is finished, best first."""
        return self.folder / "sweep.json"

    def path(self, trial: Trial) -> Path:
        """The trial's run directory."""
        return self.folder / trial.name


@dataclass(frozen=True)
class _TrialTask(Placed):
    number: int
    run: JudgedRun
    instances: Sequence[Instance]

    @property
    def device(self) -> str:
        return self.run.settings.devices[0]


def run_sweep(
    sweep: Sweep,
    workers: Workers,
    hear: Callable[[Told], None],
    finished: Callable[[int, Ranked], None],
) -> list[Ranked]:
    """All trials, best first; each computes in one process, whatever its shards.

    Raises:
        ConfigError: the folder holds trials of other settings.
        RunError: it cannot be written, or a worker process died.
    """
    suite = get_suite(sweep.trials[0].settings.suite)
    instances = suite.sample(sweep.instances, "heldout", np.random.default_rng(_STREAM))
    tasks = [
        _TrialTask(number, JudgedRun(sweep.path(trial), trial.settings, WHAT), instances)
        for number, trial in enumerate(sweep.trials)
    ]
    ranking: list[Ranked] = []
    for number, outcomes in workers.computed(_computed, tasks, hear):
        trial = sweep.trials[number]
        ranked = _ranked(trial, outcomes)
        finished(number, ranked)
        ranking = sorted([*ranking, ranked], key=lambda one: (-one.score, one.trial))
        _write(sweep, ranking)
    return ranking


def _computed(task: _TrialTask) -> Generator[Told, None, list[Outcome]]:
    """Tells of every iteration, in order, those done before included: begun anew, a task has to say the same again."""
    done = 0
    with LocalWorkers(1) as workers:
        course = task.run.judged(task.instances, workers)
        while True:
            try:
                iteration = next(course)
            except StopIteration as end:
                yield from _done_before(task, done, task.run.settings.iterations)
                return end.value
            yield from _done_before(task, done, iteration.number - 1)
            done = iteration.number
            yield Told(task.number, done, iteration)


def _done_before(task: _TrialTask, told: int, done: int) -> Generator[Told]:
    """Iterations of which nobody has told."""
    for number in range(told + 1, done + 1):
        yield Told(task.number, number, None)


def _ranked(trial: Trial, outcomes: Sequence[Outcome]) -> Ranked:
    return Ranked(
        trial.name,
        trial.choices,
        mean(one.score for one in outcomes),
        mean(one.test_accuracy for one in outcomes),
        mean(one.growth for one in outcomes),
    )


def _write(sweep: Sweep, ranking: Sequence[Ranked]) -> None:
    record = {
        "trials": len(sweep.trials),
        "finished": len(ranking),
        "instances": sweep.instances,
        "caution": CAUTION,
        "ranking": [asdict(one) for one in ranking],
    }
    write_atomically(sweep.ranking, json.dumps(record, indent=1))
