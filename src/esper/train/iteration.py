"""What iterations of training led to: the figures of one, what store and checkpoint keep of them, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from esper.errors import CheckpointError
from esper.rl.diagnostics import HISTORY, Anomaly, UpdateHistory, UpdateMetrics, find_anomalies
from esper.runs.events import AnomalyRaised, PolicyProbed, PPOUpdated
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.tasks.registry import get_suite
from esper.train.collect import ShardResult
from esper.train.settings import TrainSettings

LEVELS = "baseline_levels"
"""Run metadata: mean score of each baseline on the probe instances."""
RECENT = 10
"""Iterations over which the objective at the end is averaged."""


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
    """Share of the own suite's episodes that ended with a committed seed, per slot's site; empty without any."""
    operations: dict[str, float]
    """Share of decisions per operation."""
    probe_score: float | None
    """Mean test score of the greedy policy on the probe instances, where it was measured."""
    update: UpdateMetrics
    anomalies: tuple[Anomaly, ...]
    environment_steps: int
    """Decisions of all episodes, those of twins included."""
    rollbacks: int
    """Networks that the governor rolled back, all episodes together."""
    seconds: float


def summarise_iteration(
    settings: TrainSettings,
    number: int,
    shards: Sequence[ShardResult],
    updates: UpdateHistory,
    probe_score: float | None,
    seconds: float,
) -> Iteration:
    """The figures of iteration ``number``, which had these shards and ended with the newest of these ``updates``."""
    logs = [shard.log for shard in shards]
    objective = np.concatenate([log.objective for log in logs])
    families = np.array([instance.family for log in logs for instance in log.instances])
    shares = [log.operation_shares() for log in logs]
    sites = get_suite(settings.suite).sites
    own = [log.kept for log in logs if log.suite == settings.suite]
    kept: list[float] = np.concatenate(own).mean(0).tolist() if own else []
    return Iteration(
        number,
        settings.iterations,
        float(objective.mean()),
        {family: float(objective[families == family].mean()) for family in sorted(set(families.tolist()))},
        float(np.mean([log.accuracies[-1].mean() for log in logs])),
        float(np.concatenate([log.added for log in logs]).mean()),
        dict(zip(sites, kept, strict=bool(own))),
        {name: float(np.mean([share[name] for share in shares])) for name in shares[0]},
        probe_score,
        updates[-1],
        find_anomalies(updates, settings.ppo.target_kl),
        sum(int(np.sum(shard.log.running)) + shard.twin_steps for shard in shards),
        sum(len(log.rollbacks) for log in logs),
        seconds,
    )


def record(store: RunStore, iteration: Iteration, baselines: Mapping[str, float]) -> None:
    """Keep an iteration's figures and how the policy fared; ``baselines`` are their scores on the probe instances."""
    number, update = iteration.number, iteration.update
    store.record_scalars(number, _scalars(iteration))
    names = tuple(str(anomaly) for anomaly in iteration.anomalies)
    metrics = update.scalars()
    for anomaly in iteration.anomalies:
        store.emit(AnomalyRaised(iteration=number, anomaly=str(anomaly), meaning=anomaly.meaning))
    if iteration.probe_score is not None:
        store.emit(PolicyProbed(iteration=number, score=iteration.probe_score, baselines=dict(baselines)))
    # Last, as it tells whoever follows the run that the iteration is whole.
    store.emit(
        PPOUpdated(
            iteration=number,
            optimizer_steps=update.optimizer_steps,
            stopped_early=update.stopped_early,
            kl=update.kl,
            anomalies=names,
            metrics=metrics,
        )
    )
    store.flush()


def _scalars(iteration: Iteration) -> dict[str, float]:
    figures = {
        "objective": iteration.objective,
        "accuracy": iteration.accuracy,
        "added": iteration.added,
        **{f"kept/{site}": share for site, share in iteration.kept.items()},
        "environment_steps": iteration.environment_steps,
        "rollbacks": iteration.rollbacks,
        "seconds": iteration.seconds,
        **{f"objective/{family}": value for family, value in iteration.objective_by_family.items()},
        **{f"operations/{name}": share for name, share in iteration.operations.items()},
        **{f"ppo/{name}": value for name, value in iteration.update.scalars().items()},
    }
    return figures if iteration.probe_score is None else {**figures, "probe_score": iteration.probe_score}


_KEY = "updates"
_HISTORY = TypeAdapter(UpdateHistory)


def history_to_state(history: UpdateHistory) -> dict[str, Any]:
    """JSON values."""
    return {_KEY: [asdict(update) for update in history]}


def history_from_state(state: Mapping[str, Any]) -> UpdateHistory:
    """What `history_to_state` was given; nothing, if the state is of a time before there was a history.

    Raises:
        CheckpointError: it is none.
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
    """What a training run came to, all its processes taken together."""

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


def summarise(reader: RunReader) -> TrainingSummary:
    """The run's figures so far; what the reader's store has not flushed is not in them."""
    objective = [value for _, value in reader.series("objective")]
    probe = [value for _, value in reader.series("probe_score")]
    return TrainingSummary(
        reader.last_iteration(),
        float(np.mean(objective[-RECENT:])) if objective else None,
        probe[-1] if probe else None,
        reader.metadata().get(LEVELS, {}),
        sum(value for _, value in reader.series("seconds")),
        int(sum(value for _, value in reader.series("environment_steps"))),
    )
