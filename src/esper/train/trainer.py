"""Learn a growth controller: collect, update, record, checkpoint, again."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Self

from esper import __version__
from esper.control.policy import Policy
from esper.errors import EsperError, RunError
from esper.numerics.devices import usable_device
from esper.numerics.random_streams import Stream, numpy_generator
from esper.rl.diagnostics import UpdateHistory, extend_history
from esper.rl.ppo import PPO
from esper.rl.rollout import concatenate_alike
from esper.runs.events import CheckpointWritten, RunEnded, RunFailed, RunInterrupted, RunResumed, RunStarted
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.serialization.checkpoints import Checkpoint, Checkpoints
from esper.signals import Interrupts, Terminated
from esper.tasks.registry import get_suite
from esper.train.baselines import baselines
from esper.train.collect import (
    ShardTask,
    collect,
    greedy_controller,
    load_start,
    new_policy,
)
from esper.train.evaluation import evaluate_controllers, evaluation_config, mean_score
from esper.train.event_recorder import describe_run
from esper.train.iteration import (
    LEVELS,
    Iteration,
    history_from_state,
    history_to_state,
    record,
    summarise_iteration,
)
from esper.train.process_pool import run_task
from esper.train.settings import TrainSettings
from esper.train.workers import Workers, require_devices


class Trainer:
    """A run in progress. Everything it needs to go on is in its newest checkpoint."""

    def __init__(self, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: Workers) -> None:
        self.run = run
        self.settings = settings
        self.store = store
        require_devices(settings.devices, workers)
        self._device = usable_device(settings.devices[0])
        self.policy: Policy = new_policy(settings).to(self._device)
        self.learner = PPO(self.policy, settings.ppo, settings.seed)
        self.done = 0
        self._updates: UpdateHistory = ()
        self._workers = workers
        self._checkpoints = Checkpoints(run.checkpoints, settings.keep_checkpoints)
        self._saved: int | None = None  # the newest checkpoint's iteration
        rng = numpy_generator(settings.seed, Stream.PROBE_INSTANCES)
        self._probes = get_suite(settings.suite).sample(settings.probe_instances, "train", rng)

    @classmethod
    def open(cls, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: Workers) -> Self:
        """A run that goes on from its newest checkpoint, or that begins: its first one holds the untrained policy.

        Raises:
            CheckpointError: there is no usable checkpoint, or it belongs to other settings.
            ConfigError: a device is missing, or there is no policy to start from, or one with other settings.
            RunError: what is to be started from is no run.
        """
        trainer = cls(run, settings, store, workers)
        # Whoever has figures had a checkpoint, which somebody removed: no reason to begin anew in silence.
        if trainer._checkpoints.iterations() or store.last_iteration():
            trainer._resume()
        else:
            if settings.start_from is not None:
                trainer.policy.load_state_dict(load_start(settings, settings.start_from))
            store.set_metadata(describe_run(settings))
            store.emit(RunStarted(iteration=0, esper_version=__version__, seed=settings.seed))
            store.flush()
            trainer._checkpoint()
        return trainer

    def _resume(self) -> None:
        checkpoint = self._checkpoints.latest()
        self._updates = history_from_state(checkpoint.state)
        self.learner.load_state_tensors(checkpoint.tensors)
        self.done = self._saved = checkpoint.iteration
        self.store.rewind(self.done)
        # A kill between the file and the store may have left the checkpoint without its record.
        if all(event.iteration != self.done for event in self.store.events(CheckpointWritten)):
            self._record_checkpoint(checkpoint)
        self.store.emit(RunResumed(iteration=self.done, esper_version=__version__))

    def baseline_levels(self) -> dict[str, float]:
        """Mean test score of each baseline on the probe instances; measured once per run."""
        known = self.store.metadata().get(LEVELS)
        if known is None:
            controllers = baselines(get_suite(self.settings.suite))
            played = evaluate_controllers(self._workers, controllers, evaluation_config(self.settings), self._probes)
            known = {controller.name: mean_score(one) for controller, one in zip(controllers, played, strict=True)}
            self.store.set_metadata({LEVELS: known})
        return known

    def train(self, report: Callable[[Iteration], None]) -> None:
        """Do the remaining iterations; ``report`` is called after each.

        Ctrl-C and SIGTERM abandon a rollout or a probe under way, which can be computed again, but wait for an update
        or for files to be written; they are raised when the last whole iteration has its checkpoint.
        """
        run_task(self.iterations(), report)

    def iterations(self) -> Generator[Iteration]:
        """Do the remaining iterations, one at a time, as `train` does."""
        began, total = time.perf_counter(), self.settings.iterations
        with Interrupts() as interrupts:
            try:
                while self.done < total:
                    with self._whole_or_undone():
                        iteration = self._iterate(interrupts)
                    yield iteration
                    if self.done == total or self.done % self.settings.checkpoint_every == 0:
                        self._checkpoint()
                    if self.done < total:
                        interrupts.check()
            except (KeyboardInterrupt, Terminated) as stop:
                self._record_interruption("SIGTERM" if isinstance(stop, Terminated) else "Ctrl-C")
                raise
            except EsperError as error:
                self._record_failure(error)
                raise
        self.store.emit(RunEnded(iteration=self.done, seconds=time.perf_counter() - began))
        self.store.flush()

    def _record_interruption(self, reason: str) -> None:
        if self._saved != self.done:
            self._checkpoint()
        self.store.emit(RunInterrupted(iteration=self.done, reason=reason))
        self.store.flush()

    def _record_failure(self, error: EsperError) -> None:
        self.store.emit(RunFailed(iteration=self.done, reason=str(error)))
        with suppress(RunError):  # the store may be what failed
            self.store.flush()

    @contextmanager
    def _whole_or_undone(self) -> Generator[None]:
        """An iteration that is abandoned after its update leaves no trace of it."""
        done, updates, learned = self.done, self._updates, self.learner.state_tensors()
        try:
            yield
        except (KeyboardInterrupt, Terminated):
            self.learner.load_state_tensors(learned)
            self.done, self._updates = done, updates
            raise

    def _iterate(self, interrupts: Interrupts) -> Iteration:
        began = time.perf_counter()
        settings = self.settings
        weights = self._workers.share({name: value.cpu() for name, value in self.policy.state_dict().items()})
        tasks = [ShardTask(settings, self.done, shard, weights) for shard in range(settings.shards)]
        with interrupts.at_once():
            shards = self._workers.gather(collect, tasks, self.store.append)
        rollout, *others = (one.to(self._device) for one in concatenate_alike([shard.rollout for shard in shards]))
        update = self.learner.update(rollout, self.done / settings.iterations, *others)
        self._updates = extend_history(self._updates, update)
        self.done += 1
        due = self.done % settings.probe_every == 0 or self.done == settings.iterations
        probe = self._probe(interrupts) if due else None
        result = summarise_iteration(settings, self.done, shards, self._updates, probe, time.perf_counter() - began)
        record(self.store, result, self.store.metadata().get(LEVELS, {}))
        return result

    def _probe(self, interrupts: Interrupts) -> float:
        # A copy for the CPU, where controllers decide.
        settings, policy = self.settings, copy.deepcopy(self.policy).cpu()
        controller = greedy_controller(policy, settings)
        with interrupts.at_once():
            return mean_score(
                evaluate_controllers(self._workers, [controller], evaluation_config(settings), self._probes)[0]
            )

    def _checkpoint(self) -> None:
        saved = self._checkpoints.save(self.done, self.learner.state_tensors(), history_to_state(self._updates))
        self._saved = self.done
        self._record_checkpoint(saved)
        self.store.flush()

    def _record_checkpoint(self, checkpoint: Checkpoint) -> None:
        file = str(checkpoint.path.relative_to(self.run.path))
        self.store.emit(CheckpointWritten(iteration=checkpoint.iteration, file=file, sha256=checkpoint.sha256))
