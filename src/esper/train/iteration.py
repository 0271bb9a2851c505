"""The figures of a training iteration: how they are computed, stored, kept in checkpoints, and summarised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from esper.errors import CheckpointError
from esper.rl.diagnostics import HISTORY, Alarm, UpdateHistory, UpdateMetrics
from esper.rl.rewards import assign_rewards, name_rewards
from esper.runs.events import AnomalyRaised, InteractionsMeasured, MinibatchRecorded, PolicyProbed, PPOUpdated
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.tasks.registry import get_suite
from esper.train.collect import ShardResult
from esper.train.settings import TrainSettings

LEVELS = "baseline_levels"
"""Run metadata: mean score of each baseline on the probe instances."""
BY_REWARD = "objective_by_reward/"
"""Prefix of the scalars of J by reward."""
RECENT = 10
"""Iterations over which the objective at the end is averaged."""


@dataclass(frozen=True)
class Iteration:
    """The figures of one iteration."""

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
    """Share of episodes on the run's own suite that ended with a committed seed, by site; empty without any."""
    operations: dict[str, float]
    """Share of decisions per operation."""
    probe_score: float | None
    """Mean test score of the greedy policy on the probe instances, where it was measured."""
    update: UpdateMetrics
    anomalies: tuple[Alarm, ...]
    """Those of the update."""
    environment_steps: int
    """Decisions of all episodes, those of the no-growth baseline included."""
    rollbacks: int
    """Networks that the governor rolled back, all episodes together."""
    seconds: float
    objective_by_reward: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean J by the reward that controllers were paid; empty where all were paid by one."""
    minibatches: tuple[Mapping[str, float], ...] = ()
    """The figures of the update's minibatches, in full; empty where they are not recorded."""
    response: str = "record"
    """What followed the anomalies, by `PPOSettings.on_anomaly`."""
    interactions: tuple[InteractionsMeasured, ...] = ()
    """What kept modules are worth in the probe instances' networks, by instance, where the policy was probed."""


def summarise_iteration(
    settings: TrainSettings,
    number: int,
    shards: Sequence[ShardResult],
    update: UpdateMetrics,
    anomalies: tuple[Alarm, ...],
    probe_score: float | None,
    seconds: float,
    minibatches: Sequence[Mapping[str, float]] = (),
    interactions: Sequence[InteractionsMeasured] = (),
) -> Iteration:
    """The figures of iteration ``number`` with these shards."""
    logs = [shard.log for shard in shards]
    objective = np.concatenate([log.objective for log in logs])
    families = np.array([instance.family for log in logs for instance in log.instances])
    shares = [log.compute_operation_shares() for log in logs]
    names = name_rewards(settings.reward)
    rewards = np.array(assign_rewards(names, settings.environments, settings.ppo.group))
    # Slots have names on the run's own suite only; in a mix, other suites have other slots.
    kept = [log.kept for log in logs if log.suite == settings.suite]
    kept_by_slot: list[float] = np.concatenate(kept).mean(0).tolist() if kept else []
    return Iteration(
        number=number,
        total=settings.iterations,
        objective=float(objective.mean()),
        objective_by_family={
            family: float(objective[families == family].mean()) for family in sorted(set(families.tolist()))
        },
        accuracy=float(np.mean([log.accuracies[-1].mean() for log in logs])),
        added=float(np.concatenate([log.added for log in logs]).mean()),
        kept=dict(zip(get_suite(settings.suite).slot_names, kept_by_slot, strict=bool(kept))),
        operations={name: float(np.mean([share[name] for share in shares])) for name in shares[0]},
        probe_score=probe_score,
        update=update,
        anomalies=anomalies,
        environment_steps=sum(int(np.sum(shard.log.running)) + shard.baseline_steps for shard in shards),
        rollbacks=sum(len(log.rollbacks) for log in logs),
        seconds=seconds,
        objective_by_reward={name: float(objective[rewards == name].mean()) for name in names if len(names) > 1},
        minibatches=tuple(minibatches),
        # Only an update that did harm is undone.
        response="record" if settings.ppo.on_anomaly == "skip" and not update.skipped else settings.ppo.on_anomaly,
        interactions=tuple(interactions),
    )


def record_iteration(store: RunStore, iteration: Iteration, baselines: Mapping[str, float]) -> None:
    """Store an iteration's figures as scalars and events; ``baselines`` are their scores on the probe instances."""
    # Scalars: one series per name.
    number, update = iteration.number, iteration.update
    scalars = {
        "objective": iteration.objective,
        "accuracy": iteration.accuracy,
        "added": iteration.added,
        **{f"kept/{site}": share for site, share in iteration.kept.items()},
        "environment_steps": iteration.environment_steps,
        "rollbacks": iteration.rollbacks,
        "seconds": iteration.seconds,
        **{f"objective/{family}": value for family, value in iteration.objective_by_family.items()},
        **{f"{BY_REWARD}{name}": value for name, value in iteration.objective_by_reward.items()},
        **{f"operations/{name}": share for name, share in iteration.operations.items()},
        **{f"ppo/{name}": value for name, value in update.scalars().items()},
    }
    if iteration.probe_score is not None:
        scalars["probe_score"] = iteration.probe_score
    store.record_scalars(number, scalars)

    # Events: anomalies, the probe, and the update.
    for alarm in iteration.anomalies:
        store.emit(
            AnomalyRaised(
                iteration=number,
                anomaly=str(alarm.anomaly),
                meaning=alarm.anomaly.meaning,
                figure=alarm.figure,
                value=alarm.value,
                bound=alarm.bound,
                head=alarm.head,
                response=iteration.response,
            )
        )
    for place, figures in enumerate(iteration.minibatches):
        store.emit(MinibatchRecorded(iteration=number, minibatch=place, figures=dict(figures)))
    for measured in iteration.interactions:
        store.emit(measured)
    if iteration.probe_score is not None:
        store.emit(PolicyProbed(iteration=number, score=iteration.probe_score, baselines=dict(baselines)))
    # The last event of an iteration: a reader of the store takes it for the sign that the iteration is complete.
    store.emit(
        PPOUpdated(
            iteration=number,
            optimizer_steps=update.optimizer_steps,
            stopped_early=update.stopped_early,
            kl=update.kl,
            anomalies=tuple(alarm.label for alarm in iteration.anomalies),
            metrics=update.scalars(),
        )
    )
    store.flush()


_KEY = "updates"
_HISTORY = TypeAdapter(UpdateHistory)


def history_to_state(history: UpdateHistory) -> dict[str, Any]:
    """The history as the JSON values that a checkpoint keeps."""
    return {_KEY: [asdict(update) for update in history]}


def history_from_state(state: Mapping[str, Any]) -> UpdateHistory:
    """Inverse of `history_to_state`; empty for a checkpoint from before there was a history.

    Raises:
        CheckpointError: the state holds something else.
    """
    try:
        return _HISTORY.validate_python(state.get(_KEY, ()))[-HISTORY:]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"the checkpoint's metrics of updates are of another version ({place}: {first['msg']}): "
            "use the Esper that wrote it"
        ) from error


@dataclass(frozen=True)
class TrainingSummary:
    """The figures of a training run so far, over all its processes."""

    iterations: int
    """Iterations done."""
    objective: float | None
    """Mean J of the last rollouts, the policy exploring; None before the first iteration."""
    probe_score: float | None
    """Mean test score of the greedy policy on the probe instances at its last measurement."""
    baselines: dict[str, float]
    """Mean score of each baseline on the same instances."""
    seconds: float
    """Spent on iterations."""
    environment_steps: int

    @property
    def environment_steps_per_second(self) -> float:
        """0 before the first iteration."""
        return self.environment_steps / self.seconds if self.seconds else 0.0


def summarise_run(reader: RunReader) -> TrainingSummary:
    """The run's figures so far, without what its store has not flushed."""
    objective = [value for _, value in reader.series("objective")]
    probe = [value for _, value in reader.series("probe_score")]
    return TrainingSummary(
        iterations=reader.last_iteration(),
        objective=float(np.mean(objective[-RECENT:])) if objective else None,
        probe_score=probe[-1] if probe else None,
        baselines=reader.metadata().get(LEVELS, {}),
        seconds=sum(value for _, value in reader.series("seconds")),
        environment_steps=int(sum(value for _, value in reader.series("environment_steps"))),
    )
