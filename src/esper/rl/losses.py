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


class Surrogate(NamedTuple):
    """The policy's part of the loss with its diagnostics, all 0-d."""

    loss: Tensor
    kl: Tensor
    """k3 estimate of KL(old || new): the mean of r - 1 - log r >= 0 (Schulman, "Approximating KL divergence", 2020)."""
    clipped: Tensor
    """Fraction of decisions whose ratio lies outside the clip range."""
    deviation: Tensor
    """Largest |r - 1|."""


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float, count: Tensor
) -> Surrogate:
    """-mean min(r A, clip(r, 1 - clip, 1 + clip) A) with r the probability ratio (Schulman et al., 2017)."""
    log_ratio = (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    loss = -(torch.minimum(ratio * advantage, bounded * advantage).sum() / count)
    with torch.no_grad():
        change = ratio - 1
        kl = (change - log_ratio).sum() / count
        return Surrogate(loss, kl, (change.abs() > clip).sum() / count, change.abs().amax())


def value_loss(value: Tensor, target: Tensor, scale: Tensor, count: Tensor) -> Tensor:
    """Half the mean squared error in units of ``scale``, the returns' standard deviation."""
    return 0.5 * (((value - target) / scale).square().sum() / count)


def head_means(figures: Tensor, is_open: Tensor, occurrences: Tensor) -> Tensor:
    """Mean ``[8]`` of each head's figure over the steps in which it had a choice; 0 if it never had one.

    A head that is rarely relevant counts as much as one that always is. ``figures`` and ``is_open`` are ``[T, E, 8]``,
    ``occurrences``, how often each head had a choice, ``[8]``.
    """
    return (figures * is_open).sum((0, 1)) / occurrences.clamp(min=1)


def entropy_bonus(entropies: Tensor, occurrences: Tensor) -> Tensor:
    """The mean, 0-d in 0..1, of the heads' mean ``entropies [8]`` over the heads that had a choice at all."""
    active = occurrences > 0
    return (entropies * active).sum() / active.sum().clamp(min=1)


@torch.no_grad()
def outside_clip_range(log_prob: Tensor, old_log_prob: Tensor, clip: float) -> Tensor:
    """Whether the probability ratio is outside 1 - clip .. 1 + clip, bool of the arguments' shape."""
    log_ratio = (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (log_ratio.exp() - 1).abs() > clip
