"""Train a growth controller: collect, update, record, write a checkpoint, repeat."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Self, TypeVar

from esper.control.policy import Policy
from esper.errors import DivergedError, EsperError, RunError
from esper.numerics.devices import describe_platform, prepare_device
from esper.numerics.random_streams import Stream, numpy_generator
from esper.rl.diagnostics import UpdateHistory, extend_history, find_anomalies, scale_rate, was_alarmed
from esper.rl.ppo import PPO
from esper.rl.rollout import concatenate_by_shape
from esper.runs.events import (
    CheckpointWritten,
    InteractionsMeasured,
    RunEnded,
    RunFailed,
    RunInterrupted,
    RunResumed,
    RunStarted,
)
from esper.runs.run_directory import RunDirectory, RunState, read_state
from esper.runs.store import RunStore
from esper.serialization.checkpoints import Checkpoint, Checkpoints
from esper.signals import Interrupts, Terminated
from esper.tasks.registry import get_suite
from esper.train.collect import (
    ShardResult,
    ShardTask,
    collect_rollout,
    create_greedy_controller,
    create_policy,
    load_start_policy,
)
from esper.train.evaluation import compute_mean_score, create_baselines, evaluate_controllers, make_evaluation_config
from esper.train.event_recorder import describe_run, record_interactions
from esper.train.iteration import (
    LEVELS,
    Iteration,
    history_from_state,
    history_to_state,
    record_iteration,
    summarise_iteration,
)
from esper.train.settings import TrainSettings
from esper.train.workers import Workers, require_devices

Result = TypeVar("Result")


class Trainer:
    """Trains a controller in a run directory. The newest checkpoint has everything that is needed to continue."""

    def __init__(self, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: Workers) -> None:
        self.run = run
        self.settings = settings
        self.store = store
        require_devices(settings.devices, workers)
        self._device = prepare_device(settings.devices[0], deterministic=settings.deterministic)
        self.policy: Policy = create_policy(settings).to(self._device)
        self.learner = PPO(self.policy, settings.ppo, settings.seed)
        self.done = 0
        self._updates: UpdateHistory = ()
        self._workers = workers
        self._checkpoints = Checkpoints(run.checkpoints, settings.keep_checkpoints)
        self._saved: int | None = None
        """Iteration of the newest checkpoint."""
        rng = numpy_generator(settings.seed, Stream.PROBE_INSTANCES)
        self._probes = get_suite(settings.suite).sample(settings.probe_instances, "train", rng)

    @classmethod
    def open(cls, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: Workers) -> Self:
        """Resume a run from its newest checkpoint, or start it with a checkpoint of the untrained policy."""
        trainer = cls(run, settings, store, workers)
        platform = describe_platform(set(settings.devices))

        # If a store has iterations, there was a checkpoint. If it was removed, fail instead of starting over.
        if trainer._checkpoints.iterations() or store.last_iteration():
            checkpoint = trainer._checkpoints.latest()
            trainer._updates = history_from_state(checkpoint.state)
            trainer.learner.load_state_tensors(checkpoint.tensors)
            trainer.done = trainer._saved = checkpoint.iteration
            store.rewind(trainer.done)
            # If the process was killed at the wrong moment, the checkpoint may lack its event.
            if all(event.iteration != trainer.done for event in store.events(CheckpointWritten)):
                trainer._record_checkpoint(checkpoint)
            # A complete run is not resumed, because there is nothing to do.
            if trainer.done < settings.iterations:
                store.emit(RunResumed(iteration=trainer.done, platform=platform))
        else:
            if settings.start_from is not None:
                trainer.policy.load_state_dict(load_start_policy(settings, settings.start_from))
            store.set_metadata(describe_run(settings))
            store.emit(RunStarted(iteration=0, platform=platform, seed=settings.seed))
            store.flush()
            trainer._save_checkpoint()
        return trainer

    def measure_baseline_levels(self) -> dict[str, float]:
        """The mean test score of each baseline on the probe instances; measured once per run."""
        levels = self.store.metadata().get(LEVELS)
        if levels is None:
            controllers = create_baselines(get_suite(self.settings.suite))
            config = make_evaluation_config(self.settings)
            results = evaluate_controllers(self._workers, controllers, config, self._probes)
            scores = map(compute_mean_score, results)
            levels = {controller.name: score for controller, score in zip(controllers, scores, strict=True)}
            self.store.set_metadata({LEVELS: levels})
        return levels

    def train(self, report: Callable[[Iteration], None]) -> None:
        """Train for the remaining iterations; ``report`` is called after each.

        Ctrl-C and SIGTERM abandon a running rollout or probe, which can be repeated, but wait for an update and for
        files to be written. They are raised once the last complete iteration has a checkpoint.
        """
        report_iterations(self.run_iterations(), report)

    def run_iterations(self) -> Generator[Iteration]:
        """Yield the remaining iterations, each as soon as it is done; interrupts are handled as in `train`."""
        settings, began = self.settings, time.perf_counter()
        with Interrupts() as interrupts:
            try:
                while self.done < settings.iterations:
                    iteration_began = time.perf_counter()
                    before = self.done, self._updates, self.learner.state_tensors()
                    try:
                        # Rollouts: complete episodes of the acting policy. A shard's events are stored when it ends.
                        weights = {name: value.cpu() for name, value in self.policy.state_dict().items()}
                        shared = self._workers.share(weights)
                        tasks = [ShardTask(settings, self.done, shard, shared) for shard in range(settings.shards)]
                        results: dict[int, ShardResult] = {}
                        with interrupts.interruptible():
                            for number, shard in self._workers.as_completed(collect_rollout, tasks):
                                self.store.append(shard.events)
                                results[number] = shard
                        shards = [results[number] for number in range(settings.shards)]

                        # The update, from one rollout per suite.
                        rollouts = concatenate_by_shape([shard.rollout for shard in shards])
                        rollout, *others = (rollout.to(self._device) for rollout in rollouts)
                        # After an anomaly, record all figures of minibatches for some iterations.
                        full = settings.telemetry.minibatches_after_anomaly
                        minibatches: list[dict[str, float]] = []
                        update = self.learner.update(
                            rollout,
                            self.done / settings.iterations,
                            *others,
                            rate_scale=scale_rate(self._updates),
                            record=minibatches if was_alarmed(self._updates, settings.ppo.target_kl, full) else None,
                        )
                        anomalies = find_anomalies(extend_history(self._updates, update), settings.ppo.target_kl)
                        # Undo a harmful update, if the settings require it.
                        if settings.ppo.on_anomaly == "skip" and any(alarm.anomaly.harms for alarm in anomalies):
                            self.learner.load_state_tensors(before[2])
                            update = {**update, "skipped": 1.0}
                        self._updates = extend_history(self._updates, update)
                        self.done += 1

                        # Every few iterations, a copy of the greedy policy on the CPU, where controllers decide, runs
                        # on the probes. The kept modules get Shapley values, alone and in pairs.
                        probe_score: float | None = None
                        interactions: list[InteractionsMeasured] = []
                        if self.done % settings.probe_every == 0 or self.done == settings.iterations:
                            controller = create_greedy_controller(copy.deepcopy(self.policy).cpu(), settings)
                            config = make_evaluation_config(settings)
                            with interrupts.interruptible():
                                (probed,) = evaluate_controllers(
                                    self._workers, [controller], config, self._probes, shapley="pairs"
                                )
                            probe_score = compute_mean_score(probed)
                            interactions = record_interactions(self.done, get_suite(settings.suite), probed.earnings)

                        seconds = time.perf_counter() - iteration_began
                        iteration = summarise_iteration(
                            settings,
                            self.done,
                            shards,
                            update,
                            anomalies,
                            probe_score,
                            seconds,
                            minibatches,
                            interactions,
                        )
                        record_iteration(self.store, iteration, self.store.metadata().get(LEVELS, {}))
                    except (KeyboardInterrupt, Terminated):
                        # Undo the update of an abandoned iteration.
                        self.done, self._updates, tensors = before
                        self.learner.load_state_tensors(tensors)
                        raise
                    yield iteration

                    # Save what is done before raising any pending Ctrl-C or SIGTERM.
                    stops = settings.ppo.on_anomaly == "stop" and bool(iteration.anomalies)
                    if stops or self.done == settings.iterations or self.done % settings.checkpoint_every == 0:
                        self._save_checkpoint()
                    if stops:
                        sentences = "; ".join(f"{one.label}: {one.describe()}" for one in iteration.anomalies)
                        raise DivergedError(
                            f"ppo.on_anomaly is stop, and iteration {self.done} had an anomaly: {sentences}. "
                            "The iteration is saved; continue with esper train --resume"
                        )
                    if self.done < settings.iterations:
                        interrupts.raise_if_requested()
            except (KeyboardInterrupt, Terminated) as stop:
                if self._saved != self.done:
                    self._save_checkpoint()
                reason = "SIGTERM" if isinstance(stop, Terminated) else "Ctrl-C"
                self.store.emit(RunInterrupted(iteration=self.done, reason=reason))
                self.store.flush()
                raise
            except EsperError as error:
                self.store.emit(RunFailed(iteration=self.done, reason=str(error)))
                with suppress(RunError):  # the store itself may have failed
                    self.store.flush()
                raise
        # A complete run lacks its final event if it was killed after its last checkpoint.
        if read_state(self.run, self.store) is not RunState.FINISHED:
            self.store.emit(RunEnded(iteration=self.done, seconds=time.perf_counter() - began))
            self.store.flush()

    def _save_checkpoint(self) -> None:
        saved = self._checkpoints.save(self.done, self.learner.state_tensors(), history_to_state(self._updates))
        self._saved = self.done
        self._record_checkpoint(saved)
        self.store.flush()

    def _record_checkpoint(self, checkpoint: Checkpoint) -> None:
        file = str(checkpoint.path.relative_to(self.run.path))
        self.store.emit(CheckpointWritten(iteration=checkpoint.iteration, file=file, sha256=checkpoint.sha256))


def report_iterations(training: Generator[Iteration, None, Result], report: Callable[[Iteration], None]) -> Result:
    """Train to the end and return what training returns; ``report`` is called after each iteration.

    An error of ``report`` is also raised inside the training, which may have something to save.
    """
    try:
        iteration = next(training)
        while True:
            try:
                report(iteration)
            except BaseException as error:  # noqa: BLE001 (Ctrl-C too)
                iteration = training.throw(error)
            else:
                iteration = next(training)
    except StopIteration as end:
        return end.value
