"""The metrics of a PPO update, and which of them show that something is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, cast

from pydantic import ConfigDict

HISTORY = 10
"""Updates that are remembered for trends, the newest included."""


@dataclass(frozen=True)
class UpdateMetrics:
    """The metrics of one PPO update. Means are over its minibatches, before their optimizer step."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    policy_loss: float
    value_loss: float
    """Half the squared error in units of the returns' variance."""
    entropy: float
    """Mean normalised entropy of the heads that had a choice, 0..1."""
    kl: float
    """Largest k3 estimate of the KL divergence from the acting policy."""
    clip_fraction: float
    """Fraction of decisions whose whole action's ratio lay outside the clip range."""
    gradient_norm: float
    """Over all parameters, before clipping."""
    first_ratio_deviation: float
    """Largest |ratio - 1| before the first optimizer step: float32's rounding, unless acting and learning disagree."""
    explained_variance: float
    """How well the acting policy's values explain their targets: 1 is perfect, 0 a constant; bounded below by -1."""
    return_mean: float
    """Mean of the returns as they were paid, before a no-growth baseline is subtracted."""
    return_deviation: float
    advantage_deviation: float
    """Before standardising."""
    learning_rate: float
    optimizer_steps: int
    stopped_early: bool
    """The KL divergence ended the update before its last epoch."""
    finite: bool
    """False: a loss or gradient was not finite; the update ended there without a step and without new statistics."""
    head_entropy: Mapping[str, float]
    """Per head, over the steps in which it had a choice; 0 if it never had one."""
    head_entropy_weight: Mapping[str, float]
    """Per head, the weight of its entropy in the mean over heads."""
    head_share: Mapping[str, float]
    """Per head, the fraction of steps in which it had a choice."""
    head_clip_fraction: Mapping[str, float]
    """Per head, the fraction of those steps in which its own probability ratio lay outside the clip range."""
    module_gradient_norm: Mapping[str, float]
    """Before clipping, of encoder, lstm and value, and per head of the parameters that belong to it alone."""

    def scalars(self) -> dict[str, float]:
        """Every number under a flat name, such as ``head_entropy/slot``."""
        flat: dict[str, float] = {}
        for name, value in vars(self).items():
            if isinstance(value, Mapping):
                parts = cast(Mapping[str, float], value)
                flat.update({f"{name}/{part}": number for part, number in parts.items()})
            else:
                flat[name] = float(value)
        return flat


UpdateHistory = tuple[UpdateMetrics, ...]
"""The last `HISTORY` updates at most, the newest last."""


def extend_history(history: UpdateHistory, update: UpdateMetrics) -> UpdateHistory:
    """The history with one update more."""
    return (*history, update)[-HISTORY:]


class Anomaly(StrEnum):
    """A sign of an unhealthy update."""

    NON_FINITE = "non-finite"
    RATIO = "ratio"
    KL = "kl"
    ENTROPY = "entropy"
    ENTROPY_FALL = "entropy fall"
    SHORT_UPDATES = "short updates"
    EXPLAINED_VARIANCE = "explained variance"

    @property
    def meaning(self) -> str:
        """A sentence for a person."""
        return _MEANINGS[self]


_MEANINGS = {
    Anomaly.NON_FINITE: "a loss or gradient was not finite, the update was abandoned",
    Anomaly.RATIO: "the policy that learns differs from the one that acted before its first step",
    Anomaly.KL: "one optimizer step moved the policy far beyond the target",
    Anomaly.ENTROPY: "the choice of operation has become nearly certain: the policy may have stopped exploring",
    Anomaly.ENTROPY_FALL: "the choice of operation has quickly become more certain: the policy may stop exploring",
    Anomaly.SHORT_UPDATES: "one optimizer step after the other is too long for target_kl: lower the learning rate",
    Anomaly.EXPLAINED_VARIANCE: "the value function predicts worse than a constant",
}


@dataclass(frozen=True)
class _Thresholds:
    """The bounds of metrics, and of their course over the remembered updates; beyond them is an anomaly."""

    ratio_deviation: float = 1e-4
    """Upper bound of `UpdateMetrics.first_ratio_deviation`; rounding stays below 1e-5."""
    kl_targets: float = 5.0
    """Upper bound of the KL divergence, in multiples of its target."""
    op_entropy: float = 0.02
    """Lower bound of the operation's normalised entropy."""
    op_entropy_kept: float = 0.5
    """Lower bound of the operation's entropy over the largest remembered one; healthy runs kept 0.75 and more."""
    short_updates: int = 3
    """Updates in a row that the KL divergence ends after at most `short_steps`."""
    short_steps: int = 1
    """Optimizer steps of a short update."""
    explained_variance: float = -0.5
    """Lower bound of the explained variance."""


THRESHOLDS = _Thresholds()


def find_anomalies(history: UpdateHistory, target_kl: float) -> tuple[Anomaly, ...]:
    """The anomalies of the newest update of the ``history``, in the order of `Anomaly`."""
    # Entropies count only in updates in which the operation was ever a choice.
    metrics = history[-1]
    numbers = metrics.scalars().values()
    op_entropies = [update.head_entropy["op"] for update in history if update.head_share["op"] > 0]
    chosen = metrics.head_share["op"] > 0
    # One short update is chance; several in a row mean that the step size is too large.
    short = [
        update.stopped_early and update.optimizer_steps <= THRESHOLDS.short_steps
        for update in history[-THRESHOLDS.short_updates :]
    ]
    checks = {
        Anomaly.NON_FINITE: not metrics.finite or not all(math.isfinite(number) for number in numbers),
        Anomaly.RATIO: metrics.first_ratio_deviation > THRESHOLDS.ratio_deviation,
        Anomaly.KL: metrics.kl > THRESHOLDS.kl_targets * target_kl,
        Anomaly.ENTROPY: chosen and op_entropies[-1] < THRESHOLDS.op_entropy,
        Anomaly.ENTROPY_FALL: chosen and op_entropies[-1] < THRESHOLDS.op_entropy_kept * max(op_entropies),
        Anomaly.SHORT_UPDATES: len(short) == THRESHOLDS.short_updates and all(short),
        Anomaly.EXPLAINED_VARIANCE: metrics.explained_variance < THRESHOLDS.explained_variance,
    }
    return tuple(anomaly for anomaly in Anomaly if checks[anomaly])
