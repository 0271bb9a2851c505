"""The figures of a training iteration: computing, storing and summarising them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from esper.errors import CheckpointError
from esper.rl.diagnostics import FIGURES, HISTORY, Alarm, Figures, UpdateHistory
from esper.rl.rewards import assign_rewards, name_rewards
from esper.runs.events import AnomalyRaised, InteractionsMeasured, MinibatchRecorded, PolicyProbed, PPOUpdated
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.tasks.registry import get_suite
from esper.train.collect import ShardResult
from esper.train.settings import TrainSettings

LEVELS = "baseline_levels"
"""Key of the run metadata with the mean score of each baseline on the probe instances."""
BY_REWARD = "objective_by_reward/"
"""Prefix of the names of the scalars with J by reward."""
RECENT = 10
"""Number of last iterations over which the final objective is averaged."""


@dataclass(frozen=True)
class Iteration:
    """The figures of one iteration."""

    number: int
    """Number of iterations done, including this one."""
    total: int
    objective: float
    """Mean J of the rollout's episodes, on validation data."""
    objective_by_family: dict[str, float]
    accuracy: float
    """Mean validation accuracy at the end of the episodes."""
    added: float
    """Mean ratio of the number of committed parameters to the host's."""
    kept: dict[str, float]
    """Fraction of episodes on the run's own suite that ended with a committed seed, by site; empty without episodes."""
    operations: dict[str, float]
    """Fraction of decisions for each operation."""
    probe_score: float | None
    """Mean test score of the greedy policy on the probe instances; None if it was not measured."""
    update: Figures
    anomalies: tuple[Alarm, ...]
    """Anomalies of the update."""
    environment_steps: int
    """Number of decisions in all episodes, including those of the no-growth baseline."""
    rollbacks: int
    """Number of rollbacks by the governor in all episodes."""
    seconds: float
    objective_by_reward: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean J by reward; empty if all environments have the same reward."""
    minibatches: tuple[Mapping[str, float], ...] = ()
    """All figures of the update's minibatches; empty if they are not recorded."""
    response: str = "record"
    """The response to the anomalies, by `PPOSettings.on_anomaly`."""
    interactions: tuple[InteractionsMeasured, ...] = ()
    """Values of the kept modules in the networks of the probe instances; empty if the policy was not probed."""


def summarise_iteration(
    settings: TrainSettings,
    number: int,
    shards: Sequence[ShardResult],
    update: Figures,
    anomalies: tuple[Alarm, ...],
    probe_score: float | None,
    seconds: float,
    minibatches: Sequence[Mapping[str, float]] = (),
    interactions: Sequence[InteractionsMeasured] = (),
) -> Iteration:
    """Compute the figures of iteration ``number`` from its shards."""
    logs = [shard.log for shard in shards]
    objective = np.concatenate([log.objective for log in logs])
    families = np.array([instance.family for log in logs for instance in log.instances])
    shares = [log.compute_operation_shares() for log in logs]
    names = name_rewards(settings.reward)
    rewards = np.array(assign_rewards(names, settings.environments, settings.ppo.group))
    # Only the run's own suite, because other suites of a mix have other slots.
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
        # Only a harmful update is undone.
        response="record" if settings.ppo.on_anomaly == "skip" and not update["skipped"] else settings.ppo.on_anomaly,
        interactions=tuple(interactions),
    )


def record_iteration(store: RunStore, iteration: Iteration, baselines: Mapping[str, float]) -> None:
    """Store an iteration's figures as scalars and events; ``baselines`` has each baseline's score on the probes."""
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
        **{f"ppo/{name}": value for name, value in update.items()},
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
    # The last event of an iteration: readers of the store treat it as the sign that the iteration is complete.
    store.emit(
        PPOUpdated(
            iteration=number,
            optimizer_steps=int(update["optimizer_steps"]),
            stopped_early=bool(update["stopped_early"]),
            kl=update["kl"],
            anomalies=tuple(alarm.label for alarm in iteration.anomalies),
            metrics=dict(update),
        )
    )
    store.flush()


_KEY = "updates"
_HISTORY = TypeAdapter(tuple[dict[str, float], ...])


def history_to_state(history: UpdateHistory) -> dict[str, Any]:
    """The history as JSON values, for a checkpoint."""
    return {_KEY: [dict(update) for update in history]}


def history_from_state(state: Mapping[str, Any]) -> UpdateHistory:
    """Inverse of `history_to_state`."""
    try:
        history = _HISTORY.validate_python(state.get(_KEY))
    except ValidationError as error:
        wrong = {".".join(map(str, one["loc"])) for one in error.errors()}
    else:
        wrong = {name for update in history for name in FIGURES.keys() ^ {key.partition("/")[0] for key in update}}
        if not wrong:
            return history[-HISTORY:]
    raise CheckpointError(
        f"the checkpoint's figures of updates are of another version ({min(wrong)}): use the Esper that wrote it"
    )


@dataclass(frozen=True)
class TrainingSummary:
    """The figures of a training run so far, over all its processes."""

    iterations: int
    """Number of iterations done."""
    objective: float | None
    """Mean J of the last rollouts, in which the policy explores; None before the first iteration."""
    probe_score: float | None
    """Mean test score of the greedy policy on the probe instances at its last measurement."""
    baselines: dict[str, float]
    """Mean score of each baseline on the same instances."""
    seconds: float
    """Total time of the iterations."""
    environment_steps: int

    @property
    def environment_steps_per_second(self) -> float:
        """Number of environment steps per second; 0 before the first iteration."""
        return self.environment_steps / self.seconds if self.seconds else 0.0


def summarise_run(reader: RunReader) -> TrainingSummary:
    """The run's figures so far; records that are not committed yet are missing."""
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
