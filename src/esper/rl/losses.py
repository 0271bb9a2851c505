"""PPO's loss: its terms, and its gradient on a minibatch, one stretch of time after the other.

The terms are pure functions of tensors. Their means are over ``count`` decisions, or over ``occurrences`` per head,
which may be more than those given: so the results of a minibatch's parts add up to that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper.control.policy import Policy, PolicyEvaluation
from esper.numerics.arrays import map_arrays, merge_arrays
from esper.rl.rollout import PPOBatch, Rollout, select_steps
from esper.rl.settings import PPOSettings

LOG_RATIO_BOUND = 10.0
"""Log-ratios are clipped to this, so that one absurd probability cannot make the loss infinite."""


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


class PolicyChange(NamedTuple):
    """How far the policy has moved from the one that acted, all 0-d."""

    kl: Tensor
    """k3 estimate of KL(old || new): the mean of r - 1 - log r >= 0 (Schulman, "Approximating KL divergence", 2020)."""
    clipped: Tensor
    """Fraction of decisions whose ratio lies outside the clip range."""
    deviation: Tensor
    """Largest |r - 1|."""


@torch.no_grad()
def measure_change(log_prob: Tensor, old_log_prob: Tensor, clip: float, count: Tensor) -> PolicyChange:
    """By the probability ratios r of whole actions, whichever the surrogate clips."""
    log_ratio = _log_ratio(log_prob, old_log_prob)
    change = log_ratio.exp() - 1
    kl = (change - log_ratio).sum() / count
    return PolicyChange(kl, (change.abs() > clip).sum() / count, change.abs().amax())


@torch.no_grad()
def outside_clip_range(log_prob: Tensor, old_log_prob: Tensor, clip: float) -> Tensor:
    """Whether the probability ratio is outside 1 - clip .. 1 + clip, bool of the arguments' shape."""
    return (_log_ratio(log_prob, old_log_prob).exp() - 1).abs() > clip


class MinibatchStats(NamedTuple):
    """Metrics of a minibatch, before its optimizer step: 0-d unless noted."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    deviation: Tensor
    """Largest |ratio - 1|."""
    head_entropy: Tensor
    """``[8]``."""
    head_share: Tensor
    """``[8]``."""
    head_clip_fraction: Tensor
    """``[8]``."""


class _Counts(NamedTuple):
    """What a minibatch's means divide by."""

    running: Tensor
    """Steps, 0-d."""
    occurrences: Tensor
    """Steps in which each head had a choice, ``[8]``."""


def _add_up(parts: Sequence[MinibatchStats]) -> MinibatchStats:
    """Metrics of parts that are shares of the whole."""
    columns = merge_arrays(torch.stack, parts)
    return map_arrays(lambda column: column.sum(0), columns)._replace(deviation=columns.deviation.amax())


class PPOLoss:
    """Differentiates the loss of one policy by the settings."""

    def __init__(self, policy: Policy, settings: PPOSettings) -> None:
        self._policy = policy
        self._settings = settings
        # Only this function is compiled: the policy itself keeps its parameters' names and acts as before.
        self._evaluate = torch.compile(policy.evaluate) if settings.compile else policy.evaluate

    def backward(self, batches: Sequence[PPOBatch], entropy_weights: Tensor) -> MinibatchStats:
        """Add the gradient of the minibatch's loss to the parameters', freeing each chunk's graph before the next one.

        The minibatch is the ``batches`` together, of different shapes; each loss counts by its steps.
        ``entropy_weights`` are ``[8]``, on the policy's device.
        Chunks hand on their memory but no gradient: truncated backpropagation through time (Williams and Peng, 1990).
        """
        steps = torch.stack([batch.rollout.running.sum() for batch in batches])
        shares = (steps / steps.sum()).unbind()
        parts = [self._backward(*one, entropy_weights) for one in zip(batches, shares, strict=True)]
        return _add_up(parts)

    def _backward(self, batch: PPOBatch, share: Tensor, entropy_weights: Tensor) -> MinibatchStats:
        """Of one batch, whose loss and metrics count by its ``share``, 0-d."""
        rollout = batch.rollout
        counts = _Counts(rollout.running.sum(), batch.is_open.sum((0, 1)))
        state, parts = rollout.state, list[MinibatchStats]()
        for chunk in self._chunks(rollout):
            seen, legal = select_steps(rollout.observations, chunk), select_steps(rollout.masks, chunk)
            with torch.autocast(self._policy.device.type, torch.bfloat16, enabled=self._settings.bf16):
                now = self._evaluate(seen, legal, rollout.actions[chunk], state)
            state = now.state.detach()
            loss, stats = self._loss(now, batch, chunk, counts, entropy_weights)
            (loss * share).backward()
            parts.append(stats)
        # The parts' means have the whole batch's counts: they add up.
        total = _add_up(parts)
        return map_arrays(lambda column: column * share, total)._replace(deviation=total.deviation)

    @torch.no_grad()
    def deviation(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Largest |ratio - 1|, 0-d, in float32 throughout: what acting and learning do not agree upon."""
        found: list[Tensor] = []
        for one in rollouts:
            now = self._policy.evaluate(one.observations, one.masks, one.actions, one.state)
            found.append((now.log_prob - one.log_prob)[one.running].expm1().abs().amax())
        return torch.stack(found).amax()

    def _chunks(self, rollout: Rollout) -> Iterator[slice]:
        """Consecutive stretches of time, up to the end of the longest episode."""
        length = self._settings.chunk or rollout.steps
        for start in range(0, rollout.steps, length):
            if start and not rollout.running[start].any():
                return
            yield slice(start, start + length)

    def _loss(
        self, now: PolicyEvaluation, batch: PPOBatch, chunk: slice, counts: _Counts, entropy_weights: Tensor
    ) -> tuple[Tensor, MinibatchStats]:
        """The chunk's part of the minibatch's loss."""
        rollout, settings = batch.rollout, self._settings
        running, is_open = rollout.running[chunk], batch.is_open[chunk]
        value, target = now.value[running], batch.target[chunk][running]
        surrogate = self._surrogate(now, batch, chunk, counts)
        error = value_loss(value, target, self._policy.value_head.scale, counts.running)
        entropies = head_means(now.entropy, is_open, counts.occurrences)
        bonus = entropy_bonus(entropies, counts.occurrences, entropy_weights)
        loss = surrogate + settings.value_weight * error - bonus
        moved = measure_change(now.log_prob[running], rollout.log_prob[chunk][running], settings.clip, counts.running)
        outside = outside_clip_range(now.chosen_log_prob, rollout.chosen_log_prob[chunk], settings.clip)
        stats = MinibatchStats(
            policy_loss=surrogate,
            value_loss=error,
            entropy=mean_of_active(entropies, counts.occurrences),
            kl=moved.kl,
            clip_fraction=moved.clipped,
            deviation=moved.deviation,
            head_entropy=entropies,
            head_share=is_open.sum((0, 1)) / counts.running,
            head_clip_fraction=head_means(outside, is_open, counts.occurrences),
        )
        return loss, map_arrays(Tensor.detach, stats)

    def _surrogate(self, now: PolicyEvaluation, batch: PPOBatch, chunk: slice, counts: _Counts) -> Tensor:
        """The chunk's part of the policy's loss."""
        rollout, advantage, clip = batch.rollout, batch.advantage[chunk], self._settings.clip
        match self._settings.surrogate:
            case "joint":
                running = rollout.running[chunk]
                old = rollout.log_prob[chunk][running]
                return joint_surrogate(now.log_prob[running], old, advantage[running], clip, counts.running)
            case "factored":
                old, is_open = rollout.chosen_log_prob[chunk], batch.is_open[chunk]
                return factored_surrogate(now.chosen_log_prob, old, advantage, clip, is_open, counts.occurrences)
