"""A run of `esper grow`: train and decide, record, checkpoint, again; in the end test and save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from esper.config import dump_settings, load_settings
from esper.errors import ConfigError
from esper.experiments.checkpoints import Checkpoints
from esper.experiments.interrupts import Interrupts
from esper.grower.practice.checkpoint import capture, restore
from esper.grower.practice.directory import GrowDirectory
from esper.grower.practice.growth import Epoch, Growth
from esper.grower.practice.record import described, figures
from esper.grower.practice.result import Result, concluded, read_result, write_result
from esper.grower.practice.settings import GrowSettings
from esper.grower.recording import Recording
from esper.growth.persist import save
from esper.signals import Terminated
from esper.tasks.practice.examples import Splits
from esper.telemetry.events import RunEnded, RunInterrupted
from esper.telemetry.store import RunStore

KEPT_CHECKPOINTS = 2


class GrowRun:
    """A run in progress, which goes on from its newest checkpoint, or begins.

    Raises:
        CheckpointError: none of its checkpoints is usable.
    """

    def __init__(self, run: GrowDirectory, growth: Growth, store: RunStore) -> None:
        self.run = run
        self.growth = growth
        self.store = store
        self.done = 0
        """Epochs."""
        self._checkpoints = Checkpoints(run.checkpoints, KEPT_CHECKPOINTS)
        if self._checkpoints.iterations():
            found = self._checkpoints.latest()
            restore(growth, found.tensors, found.state)
            self.done = found.iteration
        blueprints = [kind.name for kind in growth.grower.subject.specs.kinds]
        recording = Recording(store, growth.model, blueprints, growth.settings.rent)
        recording.begin(self.done, growth.settings.seed, described(growth.settings))
        growth.grower.recording = recording

    def train(self, show: Callable[[Epoch], None]) -> None:
        """Do the epochs that remain and ``show`` each, up to a plateau; Ctrl-C and SIGTERM lose one at most.

        Raises:
            DivergedError: training blew up more often than the governor's `max_rollbacks`.
        """
        try:
            with Interrupts() as interrupts:
                while not self.over:
                    with interrupts.at_once():
                        epoch = self.growth.epoch(self.done + 1)
                    self.store.scalars(epoch.number, figures(epoch))
                    self.store.flush()
                    self._checkpoints.save(epoch.number, *capture(self.growth))
                    self.done = epoch.number
                    show(epoch)
                    interrupts.check()
        except (KeyboardInterrupt, Terminated) as stopped:
            self.store.emit(RunInterrupted(self.done, type(stopped).__name__))
            self.store.flush()
            raise

    @property
    def over(self) -> bool:
        """Whether all epochs are done, or nothing more is to be won by another."""
        return self.done >= self.growth.settings.epochs or self.growth.grower.finished

    def conclude(self) -> Result:
        """Judge what is unfinished, test and save what stays; the second time, only read the result."""
        if self.run.result.exists():
            return read_result(self.run.result)
        self.growth.grower.finish()
        result = concluded(self.growth, self.growth.test(), self.store)
        save(self.growth.model, self.run.model)
        self.store.emit(RunEnded(self.done, result.seconds))
        self.store.flush()
        write_result(result, self.run.result)
        return result


def result_at(path: Path, settings: GrowSettings, splits: Splits, what: str) -> Result:
    """Of the run in the directory ``path``, which is begun or gone on with if need be; ``what`` tells who asks.

    Raises:
        ConfigError: the directory holds a run of other settings.
        RunError: it cannot be written, or is in use.
    """
    if (path / "config.yaml").exists():
        directory = GrowDirectory.open_own(path)
        if load_settings(GrowSettings, directory.config) != settings:
            raise ConfigError(f"{path} holds a run of other settings: choose another folder")
    else:
        directory = GrowDirectory.create(path)
    if directory.result.exists():
        return read_result(directory.result)
    with directory.locked(what):
        dump_settings(settings, directory.config)
        with directory.open_store() as store:
            run = GrowRun(directory, Growth(settings, splits), store)
            run.train(lambda epoch: None)  # noqa: ARG005
            return run.conclude()
