"""The figures of a PPO update, the anomalies that they show, and the response to these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

HISTORY = 10
"""Number of updates that are remembered for trends, including the newest."""


Figures = Mapping[str, float]
"""The figures of one PPO update by the names of `FIGURES`; those of a head or module as ``name/head``."""
FIGURES: Mapping[str, str] = {
    "policy_loss": "the clipped surrogate",
    "value_loss": "half the squared error of values, in units of the returns' variance",
    "entropy": "mean normalised entropy of the heads that had a choice, 0 to 1",
    "kl": "largest k3 estimate of the KL divergence from the acting policy",
    "clip_fraction": "fraction of decisions whose probability ratio left the clip range",
    "gradient_norm": "norm of the gradient of all parameters, before clipping",
    "first_ratio_deviation": "largest |ratio - 1| before the first optimizer step: rounding, "
    "unless acting and learning disagree",
    "explained_variance": "how well the acting policy's values predict returns: 1 is perfect, 0 a constant",
    "return_mean": "mean of the returns as they were paid, before a no-growth baseline is subtracted",
    "return_deviation": "their standard deviation",
    "advantage_deviation": "standard deviation of advantages, before standardising",
    "learning_rate": "learning rate of the optimizer",
    "rate_scale": "its factor, below 1 if earlier updates were skipped",
    "optimizer_steps": "number of optimizer steps",
    "stopped_early": "1: the KL divergence ended the update before its last epoch",
    "finite": "0: a loss or gradient was not finite; the update ended there, without that step and new statistics",
    "skipped": "1: the update was undone because of an anomaly (`PPOSettings.on_anomaly`)",
    "head_entropy": "entropy of a head over the decisions in which it had a choice; 0 if it never had one",
    "head_entropy_weight": "weight of a head's entropy in the mean over heads",
    "head_share": "fraction of decisions in which a head had a choice",
    "head_clip_fraction": "fraction of these whose own probability ratio left the clip range",
    "module_gradient_norm": "norm of the gradient of encoder, lstm, value, or a head's own parameters",
}
"""What each figure of an update means. Means are over its minibatches, before their optimizer step."""
UpdateHistory = tuple[Figures, ...]
"""The last `HISTORY` updates at most, the newest last."""


def extend_history(history: UpdateHistory, update: Figures) -> UpdateHistory:
    """The history with one more update."""
    return (*history, update)[-HISTORY:]


class Anomaly(StrEnum):
    """A sign of an unhealthy update."""

    NON_FINITE = "non-finite"
    RATIO = "ratio"
    KL = "kl"
    CLIPPED = "clipped"
    GRADIENT = "gradient"
    ENTROPY = "entropy"
    ENTROPY_FALL = "entropy fall"
    STARVED = "starved"
    SHORT_UPDATES = "short updates"
    EXPLAINED_VARIANCE = "explained variance"

    @property
    def meaning(self) -> str:
        """A sentence for a person."""
        return _MEANINGS[self]

    @property
    def harms(self) -> bool:
        """Whether the update caused the anomaly, so that undoing it helps; other anomalies describe the policy."""
        return self in _HARMFUL


_MEANINGS = {
    Anomaly.NON_FINITE: "a loss or gradient was not finite, the update was abandoned",
    Anomaly.RATIO: "the policy that learns differs from the one that acted before its first step",
    Anomaly.KL: "one optimizer step moved the policy far beyond the target",
    Anomaly.CLIPPED: "nearly all probability ratios left the clip range: lower the learning rate",
    Anomaly.GRADIENT: "the head had choices, but no gradient: it does not learn",
    Anomaly.ENTROPY: "the choice has become nearly certain: the policy may have stopped exploring",
    Anomaly.ENTROPY_FALL: "the choice has quickly become more certain: the policy may stop exploring",
    Anomaly.STARVED: "the head hardly had a choice any more: it cannot learn",
    Anomaly.SHORT_UPDATES: "one optimizer step after the other is too long for target_kl: lower the learning rate",
    Anomaly.EXPLAINED_VARIANCE: "the value function predicts worse than a constant",
}
_HARMFUL = frozenset({Anomaly.NON_FINITE, Anomaly.RATIO, Anomaly.KL, Anomaly.CLIPPED})


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

    def require_at_most(bound: float, anomaly: Anomaly, figure: str, head: str | None = None) -> None:
        if update[figure] > bound:
            alarms.append(Alarm(anomaly, figure, update[figure], bound, head))

    def require_at_least(bound: float, anomaly: Anomaly, figure: str, head: str | None = None) -> None:
        if update[figure] < bound:
            alarms.append(Alarm(anomaly, figure, update[figure], bound, head))

    # The update as a whole.
    require_at_least(1.0, Anomaly.NON_FINITE, "finite")
    unbounded = [name for name, number in update.items() if not math.isfinite(number)]
    if update["finite"] and unbounded:
        alarms.append(Alarm(Anomaly.NON_FINITE, unbounded[0], update[unbounded[0]], math.inf))
    require_at_most(limits.ratio_deviation, Anomaly.RATIO, "first_ratio_deviation")
    require_at_most(limits.kl_targets * target_kl, Anomaly.KL, "kl")
    require_at_least(limits.explained_variance, Anomaly.EXPLAINED_VARIANCE, "explained_variance")
    # One short update is chance; several in a row mean that the step size is too large.
    recent = history[-limits.short_updates :]
    if len(recent) == limits.short_updates and all(
        one["stopped_early"] and one["optimizer_steps"] <= limits.short_steps for one in recent
    ):
        alarms.append(Alarm(Anomaly.SHORT_UPDATES, "optimizer_steps", update["optimizer_steps"], limits.short_steps))

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
