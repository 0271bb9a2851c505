"""Learn a growth controller: collect, update, record, checkpoint, again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from esper import __version__
from esper.control.learned import Learned
from esper.control.policy import Policy
from esper.experiments.baselines import baselines
from esper.experiments.checkpoints import Checkpoints
from esper.experiments.collect import ShardTask, collect, joined, new_policy
from esper.experiments.interrupts import Interrupts
from esper.experiments.play import mean_score, play
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.experiments.tallies import Tally
from esper.experiments.workers import LocalWorkers
from esper.rl.diagnostics import Anomaly, UpdateMetrics, anomalies
from esper.rl.ppo import Learner
from esper.tasks.registry import get_suite
from esper.telemetry.events import (
    CheckpointWritten,
    LifecycleTransition,
    PPOUpdated,
    RunEnded,
    RunInterrupted,
    RunResumed,
    RunStarted,
)
from esper.telemetry.store import RunStore

_PROBE_STREAM = 3
LEVELS = "baseline_levels"
"""Run metadata: mean score of each baseline on the probe instances."""


@dataclass(frozen=True)
class Iteration:
    """What one iteration led to."""

    number: int
    """Iterations done, this one included."""
    total: int
    objective: float
    """Mean J of the rollout's episodes, on validation data."""
    objective_by_family: dict[str, float]
    accuracy: float
    """Mean validation accuracy at the end of the episodes."""
    added: float
    """Mean of the committed parameters over the host's."""
    kept: dict[str, float]
    """Share of the episodes that ended with a committed seed, per slot's site."""
    operations: dict[str, float]
    """Share of decisions per operation."""
    probe_score: float | None
    """Mean test score of the greedy policy on the probe instances, where it was measured."""
    update: UpdateMetrics
    anomalies: tuple[Anomaly, ...]
    environment_steps: int
    seconds: float


class Trainer:
    """A run in progress. Everything it needs to go on is in its newest checkpoint."""

    def __init__(self, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: LocalWorkers) -> None:
        self.run = run
        self.settings = settings
        self.store = store
        self.policy: Policy = new_policy(settings)
        self.learner = Learner(self.policy, settings.ppo, settings.seed)
        self.done = 0
        self._workers = workers
        self._checkpoints = Checkpoints(run.checkpoints, settings.keep_checkpoints)
        rng = np.random.default_rng((settings.seed, _PROBE_STREAM))
        self._probes = get_suite(settings.suite).sample(settings.probe_instances, "train", rng)

    @classmethod
    def started(cls, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: LocalWorkers) -> Self:
        """A new run: its first checkpoint holds the untrained policy."""
        trainer = cls(run, settings, store, workers)
        store.emit(RunStarted(0, __version__, settings.seed))
        trainer._checkpoint()
        return trainer

    @classmethod
    def resumed(cls, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: LocalWorkers) -> Self:
        """A run that goes on from its newest checkpoint.

        Raises:
            CheckpointError: there is no usable checkpoint, or it belongs to other settings.
        """
        trainer = cls(run, settings, store, workers)
        checkpoint = trainer._checkpoints.latest()
        trainer.learner.load_state_tensors(checkpoint.tensors)
        trainer.done = checkpoint.iteration
        store.rewind(checkpoint.iteration)
        store.emit(RunResumed(checkpoint.iteration, __version__))
        return trainer

    def baseline_levels(self) -> dict[str, float]:
        """Mean test score of each baseline on the probe instances; measured once per run."""
        known = self.store.metadata().get(LEVELS)
        if known is None:
            controllers = baselines(get_suite(self.settings.suite))
            played = play(self._workers, controllers, self.settings.suite, self.settings.rules, self._probes)
            known = {controller.name: mean_score(one) for controller, one in zip(controllers, played, strict=True)}
            self.store.set_metadata({LEVELS: known})
        return known

    def train(self, report: Callable[[Iteration], None]) -> None:
        """Do the remaining iterations; ``report`` is called after each.

        Ctrl-C ends the run after the iteration under way, with a checkpoint, and is raised then; a second one at once.
        """
        began = time.perf_counter()
        with Interrupts() as interrupts:
            while self.done < self.settings.iterations:
                report(self._iterate())
                finished = self.done == self.settings.iterations
                if finished or interrupts.requested or self.done % self.settings.checkpoint_every == 0:
                    self._checkpoint()
                if interrupts.requested and not finished:
                    self.store.emit(RunInterrupted(self.done, "Ctrl-C"))
                    self.store.flush()
                    raise KeyboardInterrupt
        self.store.emit(RunEnded(self.done, time.perf_counter() - began))
        self.store.flush()

    def _iterate(self) -> Iteration:
        began = time.perf_counter()
        settings = self.settings
        weights = self.policy.state_dict()
        tasks = [ShardTask(settings, self.done, shard, weights) for shard in range(settings.shards)]
        shards = self._workers.map(collect, tasks)
        rollout = joined([shard.rollout for shard in shards])
        update = self.learner.update(rollout, self.done / settings.iterations)
        self.done += 1
        due = self.done % settings.probe_every == 0 or self.done == settings.iterations
        result = _summary(
            [shard.tally for shard in shards],
            update,
            self,
            self._probe() if due else None,
            rollout.steps * rollout.environments,
            time.perf_counter() - began,
        )
        self._record(result, shards[0].tally)
        return result

    def _probe(self) -> float:
        controller = Learned(self.policy, greedy=True)
        return mean_score(play(self._workers, [controller], self.settings.suite, self.settings.rules, self._probes)[0])

    def _record(self, result: Iteration, first: Tally) -> None:
        scalars = {
            "objective": result.objective,
            "accuracy": result.accuracy,
            "added": result.added,
            **{f"kept/{site}": share for site, share in result.kept.items()},
            "environment_steps": result.environment_steps,
            "seconds": result.seconds,
            **{f"objective/{family}": value for family, value in result.objective_by_family.items()},
            **{f"operations/{name}": share for name, share in result.operations.items()},
            **{f"ppo/{name}": value for name, value in result.update.scalars().items()},
        }
        if result.probe_score is not None:
            scalars["probe_score"] = result.probe_score
        self.store.scalars(self.done, scalars)
        self.store.emit(
            PPOUpdated(
                self.done,
                result.update.optimizer_steps,
                result.update.stopped_early,
                result.update.kl,
                tuple(str(anomaly) for anomaly in result.anomalies),
            )
        )
        for change in first.changes:
            if change.environment == 0:
                self.store.emit(LifecycleTransition(self.done, **vars(change)))
        self.store.flush()

    def _checkpoint(self) -> None:
        saved = self._checkpoints.save(self.done, self.learner.state_tensors(), {})
        file = str(saved.path.relative_to(self.run.path))
        self.store.emit(CheckpointWritten(self.done, file, saved.sha256))
        self.store.flush()


def _summary(
    tallies: list[Tally], update: UpdateMetrics, trainer: Trainer, probe: float | None, steps: int, seconds: float
) -> Iteration:
    objective = np.concatenate([tally.objective for tally in tallies])
    families = np.array([instance.family for tally in tallies for instance in tally.instances])
    shares = [tally.operation_shares() for tally in tallies]
    kept = np.concatenate([tally.kept for tally in tallies]).mean(0)
    return Iteration(
        trainer.done,
        trainer.settings.iterations,
        float(objective.mean()),
        {family: float(objective[families == family].mean()) for family in sorted(set(families.tolist()))},
        float(np.mean([tally.accuracies[-1].mean() for tally in tallies])),
        float(np.concatenate([tally.added for tally in tallies]).mean()),
        dict(zip(get_suite(trainer.settings.suite).sites, kept.tolist(), strict=True)),
        {name: float(np.mean([share[name] for share in shares])) for name in shares[0]},
        probe,
        update,
        anomalies(update, trainer.settings.ppo.target_kl),
        steps,
        seconds,
    )
