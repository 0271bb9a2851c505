"""The figures of a training iteration: computing, storing and summarising them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from esper.errors import CheckpointError
from esper.rl.diagnostics import FIGURES, HISTORY, Alarm, Figures, UpdateHistory
from esper.rl.rewards import assign_rewards, name_rewards
from esper.runs.events import AnomalyRaised, InteractionsMeasured, MinibatchRecorded, PolicyProbed, PPOUpdated
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.serialization.state_files import strip_prefix
from esper.tasks.registry import get_suite
from esper.train.collect import ShardResult
from esper.train.settings import TrainSettings

LEVELS = "baseline_levels"
"""Key of the run metadata with the mean score of each baseline on the probe instances."""
BY_FAMILY, BY_REWARD, KEPT, OPERATIONS, UPDATE = "objective/", "objective_by_reward/", "kept/", "operations/", "ppo/"
"""Prefixes of the names of figures: J by family and by reward, shares by slot and operation, figures of the update."""
RECENT = 10
"""Number of last iterations over which the final objective is averaged."""


@dataclass(frozen=True)
class Iteration:
    """One iteration of a training run."""

    number: int
    """Number of iterations done, including this one."""
    total: int
    figures: Mapping[str, float]
    """The figures by the names of their series in the run's store, such as ``objective`` or ``ppo/kl``."""
    anomalies: tuple[Alarm, ...] = ()
    """Anomalies of the update."""
    response: str = "record"
    """The response to the anomalies, by `PPOSettings.on_anomaly`."""
    minibatches: Sequence[Mapping[str, float]] = ()
    """All figures of the update's minibatches; empty if they are not recorded."""
    interactions: Sequence[InteractionsMeasured] = ()
    """Values of the kept modules in the networks of the probe instances; empty if the policy was not probed."""


def compute_figures(
    settings: TrainSettings, shards: Sequence[ShardResult], update: Figures, probe_score: float | None, seconds: float
) -> dict[str, float]:
    """The figures of an iteration from its shards and its update.

    ``objective``, ``accuracy`` and ``added`` are means over the episodes at their ends, J and accuracy on validation
    data; ``kept/SITE`` is the fraction of episodes that ended with a committed seed there. ``probe_score``, the mean
    test score of the greedy policy on the probe instances, is present where it was measured.
    """
    logs = [shard.log for shard in shards]
    objective = np.concatenate([log.objective for log in logs])
    families = np.array([instance.family for log in logs for instance in log.instances])
    shares = [log.compute_operation_shares() for log in logs]
    names = name_rewards(settings.reward)
    rewards = np.array(assign_rewards(names, settings.environments, settings.ppo.group))
    # Only the run's own suite, because other suites of a mix have other slots.
    kept = [log.kept for log in logs if log.suite == settings.suite]
    kept_by_slot: list[float] = np.concatenate(kept).mean(0).tolist() if kept else []
    slots = get_suite(settings.suite).slot_names
    return {
        "objective": float(objective.mean()),
        "accuracy": float(np.mean([log.accuracies[-1].mean() for log in logs])),
        "added": float(np.concatenate([log.added for log in logs]).mean()),
        **{f"{KEPT}{slot}": share for slot, share in zip(slots, kept_by_slot, strict=bool(kept))},
        "environment_steps": sum(int(np.sum(shard.log.running)) + shard.baseline_steps for shard in shards),
        "rollbacks": sum(len(log.rollbacks) for log in logs),
        "seconds": seconds,
        **{f"{BY_FAMILY}{name}": float(objective[families == name].mean()) for name in sorted(set(families.tolist()))},
        **{f"{BY_REWARD}{name}": float(objective[rewards == name].mean()) for name in names if len(names) > 1},
        **{f"{OPERATIONS}{name}": float(np.mean([share[name] for share in shares])) for name in shares[0]},
        **{f"{UPDATE}{name}": value for name, value in update.items()},
        **({} if probe_score is None else {"probe_score": probe_score}),
    }


def record_iteration(store: RunStore, iteration: Iteration, baselines: Mapping[str, float]) -> None:
    """Store an iteration's figures as scalars and events; ``baselines`` has each baseline's score on the probes."""
    number, figures = iteration.number, iteration.figures
    store.record_scalars(number, figures)
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
    for place, minibatch in enumerate(iteration.minibatches):
        store.emit(MinibatchRecorded(iteration=number, minibatch=place, figures=dict(minibatch)))
    for measured in iteration.interactions:
        store.emit(measured)
    if "probe_score" in figures:
        store.emit(PolicyProbed(iteration=number, score=figures["probe_score"], baselines=dict(baselines)))
    # The last event of an iteration: readers of the store treat it as the sign that the iteration is complete.
    update = strip_prefix(UPDATE, figures)
    store.emit(
        PPOUpdated(
            iteration=number,
            optimizer_steps=int(update["optimizer_steps"]),
            stopped_early=bool(update["stopped_early"]),
            kl=update["kl"],
            anomalies=tuple(alarm.label for alarm in iteration.anomalies),
            metrics=update,
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
