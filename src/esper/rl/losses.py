"""The terms of PPO's loss, as pure functions of tensors.

Their means are over ``count`` decisions, or over ``occurrences`` per head, which may be more than those given: so the
results of a minibatch's parts add up to that of the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_BOUND = 10.0
"""Log-ratios are clipped to this, so that one absurd probability cannot make the loss infinite."""


class Drift(NamedTuple):
    """How far the policy has moved from the one that acted, all 0-d."""

    kl: Tensor
    """k3 estimate of KL(old || new): the mean of r - 1 - log r >= 0 (Schulman, "Approximating KL divergence", 2020)."""
    clipped: Tensor
    """Fraction of decisions whose ratio lies outside the clip range."""
    deviation: Tensor
    """Largest |r - 1|."""


@torch.no_grad()
def drift(log_prob: Tensor, old_log_prob: Tensor, clip: float, count: Tensor) -> Drift:
    """By the probability ratios r of whole actions, whichever the surrogate clips."""
    log_ratio = _log_ratio(log_prob, old_log_prob)
    change = log_ratio.exp() - 1
    kl = (change - log_ratio).sum() / count
    return Drift(kl, (change.abs() > clip).sum() / count, change.abs().amax())


def joint_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float, count: Tensor) -> Tensor:
    """-mean min(r A, clip(r, 1 - clip, 1 + clip) A), 0-d, with r the probability ratio (Schulman et al., 2017).

    At r = 1 its gradient is -(1 / N) sum over N steps t of A_t sum over heads h of grad log p_th: a head that has a
    choice in n of them learns from each as much as the others do, and so n / N times as fast.
    """
    return -(_clipped_gain(log_prob, old_log_prob, advantage, clip).sum() / count)


def factored_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float, is_open: Tensor, occurrences: Tensor
) -> Tensor:
    """The surrogate, 0-d, of each head by its own ratio over the steps in which it had a choice, summed over heads.

    -sum over heads h of (1 / n_h) sum over its n_h steps t of min(r_th A_t, clip(r_th, 1 - clip, 1 + clip) A_t). At
    r = 1 its gradient is -sum over h of (1 / n_h) sum over t of A_t grad log p_th: a head learns as fast from few steps
    as from many. The parts of an action are also clipped one by one by Han and Sung ("Dimension-wise importance
    sampling weight clipping", 2019) and Fan et al. ("Hybrid actor-critic reinforcement learning in parameterized action
    space", 2019).

    ``log_prob``, ``old_log_prob`` and ``is_open`` are ``[T, E, 8]``, ``advantage`` ``[T, E]``, ``occurrences``, how
    often each head had a choice, ``[8]``.
    """
    gain = _clipped_gain(log_prob, old_log_prob, advantage.unsqueeze(-1), clip)
    return -head_means(gain, is_open, occurrences).sum()


def _clipped_gain(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = _log_ratio(log_prob, old_log_prob).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def _log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def value_loss(value: Tensor, target: Tensor, scale: Tensor, count: Tensor) -> Tensor:
    """Half the mean squared error in units of ``scale``, the returns' standard deviation."""
    return 0.5 * (((value - target) / scale).square().sum() / count)


def head_means(figures: Tensor, is_open: Tensor, occurrences: Tensor) -> Tensor:
    """Mean ``[8]`` of each head's figure over the steps in which it had a choice; 0 if it never had one.

    A head that is rarely relevant counts as much as one that always is. ``figures`` and ``is_open`` are ``[T, E, 8]``,
    ``occurrences``, how often each head had a choice, ``[8]``.
    """
    return (figures * is_open).sum((0, 1)) / occurrences.clamp(min=1)


def mean_of_active(figures: Tensor, occurrences: Tensor) -> Tensor:
    """The mean, 0-d, of the heads' ``figures [8]`` over the heads that had a choice at all; 0 if none had."""
    active = occurrences > 0
    return (figures * active).sum() / active.sum().clamp(min=1)


def entropy_bonus(entropies: Tensor, occurrences: Tensor, weights: Tensor) -> Tensor:
    """`mean_of_active` of the heads' mean ``entropies [8]``, each times its weight, ``[8]``."""
    active = occurrences > 0
    # Weights are shared out first: then equal ones give the same gradient, to the bit, as one that multiplies the mean.
    return (entropies * (weights * active / active.sum().clamp(min=1))).sum()


@torch.no_grad()
def outside_clip_range(log_prob: Tensor, old_log_prob: Tensor, clip: float) -> Tensor:
    """Whether the probability ratio is outside 1 - clip .. 1 + clip, bool of the arguments' shape."""
    return (_log_ratio(log_prob, old_log_prob).exp() - 1).abs() > clip
