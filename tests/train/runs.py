"""Training runs so small that a test can afford them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from esper.config.loading import dump_settings, load_settings
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.train.iteration import Iteration
from esper.train.settings import TrainSettings
from esper.train.trainer import Trainer
from esper.train.workers import LocalWorkers

TINY = (
    "suite=short",
    "environments=8",
    "shards=1",
    "probe_instances=2",
    "policy.hidden=16",
    "policy.width=16",
    "ppo.group=4",
    "ppo.minibatches=2",
    "ppo.epochs=2",
)
"""Overrides of the default settings; they need `short_suite`."""


def tiny(*overrides: str) -> TrainSettings:
    return load_settings(TrainSettings, None, (*TINY, *overrides))


@contextmanager
def started(path: Path, settings: TrainSettings) -> Iterator[Trainer]:
    run = RunDirectory.create(path)
    dump_settings(settings, run.config)
    with RunStore.create(run.store) as store, LocalWorkers(settings.shards) as workers:
        yield Trainer.open(run, settings, store, workers)


def create_untrained_run(path: Path, *overrides: str) -> str:
    """The directory of a run whose policy has learned nothing yet, on the token suite."""
    with started(path, tiny("suite=tokens", *overrides)):
        return str(path)


@contextmanager
def resumed(path: Path) -> Iterator[Trainer]:
    run = RunDirectory.open(path)
    settings = load_settings(TrainSettings, run.config)
    with RunStore.open(run.store) as store, LocalWorkers(settings.shards) as workers:
        yield Trainer.open(run, settings, store, workers)


def ignore(iteration: Iteration) -> None:
    """A report of an iteration that nobody reads."""


def at(number: int, act: Callable[[], None]) -> Callable[[Iteration], None]:
    """A report that acts once, after that iteration."""

    def report(iteration: Iteration) -> None:
        if iteration.number == number:
            act()

    return report
