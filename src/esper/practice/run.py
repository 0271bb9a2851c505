"""A run of `esper grow` in its directory: train and decide, record, checkpoint, again; in the end test and save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from esper.errors import CheckpointError
from esper.grower.decision import Ending
from esper.grower.recording import Recording
from esper.grower.state_dict import regrow, structure
from esper.growth.persist import save
from esper.practice.result import GrowResult, epoch_scalars, read_result, summarise_run, write_result
from esper.practice.training import Epoch, HostTraining
from esper.runs.events import RunInterrupted
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.serialization.checkpoints import Checkpoints
from esper.serialization.state_files import pack, take_prefix, unpack
from esper.signals import Interrupts, Terminated

KEPT_CHECKPOINTS = 2
_MODEL, _OPTIMIZER = "model.", "optimizer."
_GROWER = "grower"
_SEEDS = "seeds"


@dataclass(frozen=True)
class GrowDirectory(RunDirectory):
    """A run directory with a grown model in it."""

    command: ClassVar[str] = "esper grow"

    @property
    def model(self) -> Path:
        """The folder of the grown model."""
        return self.path / "model"

    @property
    def result(self) -> Path:
        """What came out, as JSON; written last."""
        return self.path / "result.json"


class GrowRun:
    """A run in progress, which goes on from its newest checkpoint, or begins.

    Raises:
        CheckpointError: none of its checkpoints is usable.
    """

    def __init__(self, run: GrowDirectory, training: HostTraining, store: RunStore) -> None:
        self.run = run
        self.training = training
        self.store = store
        self.done = 0
        """Epochs."""
        self._checkpoints = Checkpoints(run.checkpoints, KEPT_CHECKPOINTS)
        if self._checkpoints.iterations():
            found = self._checkpoints.latest()
            restore(training, found.tensors, found.state)
            self.done = found.iteration
        settings = training.settings
        self._recording = Recording(store, training.model, training.grower.network.blueprints)
        facts = {
            "task": settings.task,
            "host": settings.host,
            "controller": settings.controller,
            "evidence": settings.evidence.value,
            "iterations": settings.epochs,
            "steps": settings.epochs,
        }
        self._recording.begin(self.done, settings.seed, facts)
        training.grower.reporter.recording = self._recording

    def train(self, show: Callable[[Epoch], None]) -> None:
        """Do the epochs that remain and ``show`` each, up to a plateau; Ctrl-C and SIGTERM lose one at most.

        Raises:
            DivergedError: training blew up more often than the governor's `max_rollbacks`.
        """
        try:
            with Interrupts() as interrupts:
                while not self.over:
                    with interrupts.at_once():
                        epoch = self.training.epoch(self.done + 1)
                    self.store.scalars(epoch.number, epoch_scalars(epoch))
                    self.store.flush()
                    self._checkpoints.save(epoch.number, *capture(self.training))
                    self.done = epoch.number
                    show(epoch)
                    interrupts.check()
        except (KeyboardInterrupt, Terminated) as stopped:
            self.store.emit(RunInterrupted(iteration=self.done, reason=type(stopped).__name__))
            self.store.flush()
            raise

    @property
    def over(self) -> bool:
        """Whether all epochs are done, or nothing more is to be won by another."""
        return self.done >= self.training.settings.epochs or self.training.grower.finished

    def conclude(self, show: Callable[[Ending], None] | None = None) -> GrowResult:
        """Judge what is unfinished, ``show`` it, test and save what stays; the second time, only read the result."""
        if self.run.result.exists():
            return read_result(self.run.result)
        ending = self.training.grower.finish()
        if show is not None:
            show(ending)
        result = summarise_run(self.training, self.training.test(), self.store)
        save(self.training.model, self.run.model)
        self._recording.keep_end(self.done, result.seconds)
        write_result(result, self.run.result)
        return result


State = tuple[dict[str, Tensor], dict[str, Any]]
"""What checkpoints hold: tensors and JSON values."""


def capture(training: HostTraining) -> State:
    """All that decides how the run goes on."""
    tensors = {f"{_MODEL}{name}": value for name, value in training.model.state_dict().items()}
    moments: dict[int, dict[str, Tensor]] = training.optimizer.state_dict()["state"]
    for index, values in moments.items():
        tensors |= {f"{_OPTIMIZER}{index}.{name}": value for name, value in values.items()}
    tensors[_GROWER] = pack(training.grower.state_dict())
    return tensors, {_SEEDS: structure(training.model)}


def restore(training: HostTraining, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Go on where `capture` was called; ``training`` was made anew from the same settings.

    Raises:
        CheckpointError: it is of other settings.
    """
    if _SEEDS not in state or _GROWER not in tensors:
        raise CheckpointError("the checkpoint is of no run of `esper grow`: give the directory of one")
    regrow(training.model, state[_SEEDS])
    try:
        training.model.load_state_dict(take_prefix(_MODEL, tensors))
    except RuntimeError as error:
        raise CheckpointError("the checkpoint is of another host: use the settings that the run had") from error
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in take_prefix(_OPTIMIZER, tensors).items():
        index, _, part = name.partition(".")
        moments.setdefault(int(index), {})[part] = value
    training.optimizer.load_state_dict({**training.optimizer.state_dict(), "state": moments})
    training.grower.load_state_dict(unpack(tensors[_GROWER]))
