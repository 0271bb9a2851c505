"""The figures of a training iteration: computing, checking, storing and summarising them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from esper.control.learned import UNTRAINED
from esper.errors import CheckpointError
from esper.rl.ppo import FIGURES, Figures
from esper.runs.events import AnomalyRaised, InteractionsMeasured, MinibatchRecorded, PolicyProbed, PPOUpdated
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.serialization import strip_prefix
from esper.tasks.registry import get_suite
from esper.train.recorder import EpisodeLog
from esper.train.settings import HISTORY, TrainSettings

LEVELS = "baseline_levels"
"""Key of the run metadata with the mean score of each baseline, and of the untrained policy, on the probe instances."""
BY_FAMILY, KEPT, OPERATIONS, UPDATE = "objective/", "kept/", "operations/", "ppo/"
"""Prefixes of the names of figures: J by family, shares by slot and operation, figures of the update."""
RECENT = 10
"""Number of last iterations over which the final objective is averaged."""


# Anomalies of updates, and the response to them

UpdateHistory = tuple[Figures, ...]
"""The last `HISTORY` updates at most, the newest last."""


def extend_history(history: UpdateHistory, update: Figures) -> UpdateHistory:
    """The history with one more update."""
    return (*history, update)[-HISTORY:]


class Anomaly(StrEnum):
    """A sign of an unhealthy update."""

    NON_FINITE = "non-finite", "a loss or gradient was not finite, the update was abandoned"
    RATIO = "ratio", "the policy that learns differs from the one that acted before its first step"
    KL = "kl", "one optimizer step moved the policy far beyond the target"
    CLIPPED = "clipped", "nearly all probability ratios left the clip range: lower the learning rate"
    GRADIENT = "gradient", "the head had choices, but no gradient: it does not learn"
    ENTROPY = "entropy", "the choice has become nearly certain: the policy may have stopped exploring"
    ENTROPY_FALL = "entropy fall", "the choice has quickly become more certain: the policy may stop exploring"
    STARVED = "starved", "the head hardly had a choice any more: it cannot learn"
    SHORT_UPDATES = (
        "short updates",
        "one optimizer step after the other is too long for target_kl: lower the learning rate",
    )
    EXPLAINED_VARIANCE = "explained variance", "the value function predicts worse than a constant"

    meaning: str
    """A sentence for a person."""

    def __new__(cls, name: str, meaning: str) -> Self:
        """A member of this name."""
        member = str.__new__(cls, name)
        member._value_, member.meaning = name, meaning
        return member

    @property
    def harms(self) -> bool:
        """Whether the update caused the anomaly, so that undoing it helps; other anomalies describe the policy."""
        return self in (Anomaly.NON_FINITE, Anomaly.RATIO, Anomaly.KL, Anomaly.CLIPPED)


@dataclass(frozen=True)
class _Thresholds:
    """The bounds of metrics and of their trends over the remembered updates; a value out of bounds is an anomaly.

    Bounds for heads apply to every head, in the updates in which it had a choice.
    """

    ratio_deviation: float = 1e-4
    """Upper bound of the first ratio's deviation; rounding stays below 1e-5."""
    kl_targets: float = 5.0
    """Upper bound of the KL divergence, in multiples of its target."""
    head_clip_fraction: float = 0.9
    """Upper bound of a head's clip fraction; heads of healthy runs reach .45."""
    head_gradient: float = 1e-9
    """Lower bound of a head's gradient norm; heads of healthy runs have .004 and more."""
    head_entropy: float = 0.02
    """Lower bound of a head's normalised entropy."""
    head_entropy_kept: float = 0.5
    """Lower bound of a head's entropy over the largest remembered one; healthy runs kept 0.75 and more."""
    head_share: float = 0.001
    """Lower bound of the share of steps in which a head has a choice, once it had one in some remembered update."""
    short_updates: int = 3
    """Updates in a row that the KL divergence ends after at most `short_steps`."""
    short_steps: int = 1
    """Optimizer steps of a short update."""
    explained_variance: float = -0.5
    """Lower bound of the explained variance."""


THRESHOLDS = _Thresholds()


class Alarm(NamedTuple):
    """A figure of an update that is beyond its bound."""

    anomaly: Anomaly
    figure: str
    """Its name, from `FIGURES`."""
    value: float
    bound: float
    head: str | None = None
    """The affected head of the policy; None: the whole update."""

    @property
    def label(self) -> str:
        """The anomaly and its head."""
        return f"{self.anomaly} of {self.head}" if self.head else str(self.anomaly)

    def describe(self) -> str:
        """A sentence with the figure and its bound."""
        return f"{self.anomaly.meaning} ({self.figure} is {self.value:.3g}, the bound {self.bound:.3g})"


def find_anomalies(history: UpdateHistory, target_kl: float) -> tuple[Alarm, ...]:
    """The anomalies of the newest update of the ``history``, in the order of `Anomaly`, then of heads."""
    update, limits = history[-1], THRESHOLDS
    alarms: list[Alarm] = []

    def require(ok: bool, anomaly: Anomaly, figure: str, bound: float, head: str | None = None) -> None:
        if not ok:
            alarms.append(Alarm(anomaly, figure, update[figure], bound, head))

    def require_at_most(bound: float, anomaly: Anomaly, figure: str, head: str | None = None) -> None:
        require(not update[figure] > bound, anomaly, figure, bound, head)

    def require_at_least(bound: float, anomaly: Anomaly, figure: str, head: str | None = None) -> None:
        require(not update[figure] < bound, anomaly, figure, bound, head)

    # The update as a whole.
    require_at_least(1.0, Anomaly.NON_FINITE, "finite")
    unbounded = [name for name, number in update.items() if not math.isfinite(number)]
    if update["finite"] and unbounded:
        require(False, Anomaly.NON_FINITE, unbounded[0], math.inf)
    require_at_most(limits.ratio_deviation, Anomaly.RATIO, "first_ratio_deviation")
    require_at_most(limits.kl_targets * target_kl, Anomaly.KL, "kl")
    require_at_least(limits.explained_variance, Anomaly.EXPLAINED_VARIANCE, "explained_variance")
    # One short update is chance; several in a row mean that the step size is too large.
    recent = history[-limits.short_updates :]
    short = [one["stopped_early"] and one["optimizer_steps"] <= limits.short_steps for one in recent]
    always_short = len(short) == limits.short_updates and all(short)
    require(not always_short, Anomaly.SHORT_UPDATES, "optimizer_steps", limits.short_steps)

    # Each head, by the same bounds, over the updates in which it had a choice.
    for name, share in update.items():
        figure, _, head = name.partition("/")
        if figure != "head_share":
            continue
        entropies = [one[f"head_entropy/{head}"] for one in history if one[name] > 0]
        if not entropies:
            continue
        require_at_least(limits.head_share, Anomaly.STARVED, name, head)
        if share > 0:
            require_at_most(limits.head_clip_fraction, Anomaly.CLIPPED, f"head_clip_fraction/{head}", head)
            if update["optimizer_steps"]:  # gradients are measured only where the update came to a step
                require_at_least(limits.head_gradient, Anomaly.GRADIENT, f"module_gradient_norm/{head}", head)
            require_at_least(limits.head_entropy, Anomaly.ENTROPY, f"head_entropy/{head}", head)
            kept = limits.head_entropy_kept * max(entropies)
            require_at_least(kept, Anomaly.ENTROPY_FALL, f"head_entropy/{head}", head)
    order = list(Anomaly)
    return tuple(sorted(alarms, key=lambda alarm: order.index(alarm.anomaly)))


def was_alarmed(history: UpdateHistory, target_kl: float, updates: int) -> bool:
    """Whether one of the last ``updates`` of the ``history``, at most `HISTORY`, had an anomaly."""
    ends = range(len(history), max(len(history) - updates, 0), -1)
    return any(find_anomalies(history[:end], target_kl) for end in ends)


SKIPPED_RATE = 0.5
"""The learning rate is multiplied by this after each update that is skipped."""


def scale_rate(history: UpdateHistory) -> float:
    """Factor of the learning rate of the next update."""
    if not history:
        return 1.0
    return history[-1]["rate_scale"] * (SKIPPED_RATE if history[-1]["skipped"] else 1.0)


# An iteration


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
    settings: TrainSettings,
    logs: Sequence[EpisodeLog],
    environment_steps: int,
    update: Figures,
    probe_score: float | None,
    seconds: float,
) -> dict[str, float]:
    """The figures of an iteration from the logs of its episodes and its update.

    ``objective``, ``accuracy`` and ``added`` are means over the episodes at their ends, J and accuracy on validation
    data; ``kept/SITE`` is the fraction of episodes that ended with a committed seed there. ``probe_score``, the mean
    test score of the greedy policy on the probe instances, is present where it was measured.
    """
    return {
        **summarise_logs(settings.suite, logs),
        "environment_steps": environment_steps,
        "seconds": seconds,
        **{f"{UPDATE}{name}": value for name, value in update.items()},
        **({} if probe_score is None else {"probe_score": probe_score}),
    }


def summarise_logs(suite: str, logs: Sequence[EpisodeLog]) -> dict[str, float]:
    """The part of an iteration's figures that is about its episodes, of a run on ``suite``."""
    objective = np.concatenate([log.objective for log in logs])
    families = np.array([instance.family for log in logs for instance in log.instances])
    shares = [log.compute_operation_shares() for log in logs]
    # Only the run's own suite, because other suites of a mix have other slots.
    kept = [log.kept for log in logs if log.suite == suite]
    kept_by_slot: list[float] = np.concatenate(kept).mean(0).tolist() if kept else []
    slots = get_suite(suite).slot_names
    return {
        "objective": float(objective.mean()),
        "accuracy": float(np.mean([log.accuracies[-1].mean() for log in logs])),
        "added": float(np.concatenate([log.added for log in logs]).mean()),
        **{f"{KEPT}{slot}": share for slot, share in zip(slots, kept_by_slot, strict=bool(kept))},
        "rollbacks": sum(len(log.rollbacks) for log in logs),
        **{f"{BY_FAMILY}{name}": float(objective[families == name].mean()) for name in sorted(set(families.tolist()))},
        **{f"{OPERATIONS}{name}": float(np.mean([share[name] for share in shares])) for name in shares[0]},
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
    untrained: float | None
    """Mean score of the same policy before training; None if it was not measured."""
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
    levels: dict[str, float] = reader.metadata().get(LEVELS, {})
    return TrainingSummary(
        iterations=reader.last_iteration(),
        objective=float(np.mean(objective[-RECENT:])) if objective else None,
        probe_score=probe[-1] if probe else None,
        untrained=levels.get(UNTRAINED),
        baselines={name: level for name, level in levels.items() if name != UNTRAINED},
        seconds=sum(value for _, value in reader.series("seconds")),
        environment_steps=int(sum(value for _, value in reader.series("environment_steps"))),
    )
