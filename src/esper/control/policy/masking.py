"""Distributions over what is legal: exact masks, log-probabilities, entropies and draws.

A masked choice has probability exactly 0 and passes exactly zero gradient to its logit. A head that is irrelevant to
the chosen operation has the one legal choice 0: its log-probability and entropy are exactly 0 and so is its gradient.
Summing over all heads is therefore the same as summing over the relevant ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.control.spaces import MaskTensors
from esper.lifecycle.actions import Head

ILLEGAL_LOGIT = -1e9
"""Finite, so that 0 * log(0) is 0; so low that its exponential is exactly 0."""

LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 below 1: a float64 uniform may round up to 1, where the inverse distribution ends."""


def legal_choices(masks: MaskTensors, head: Head, op: Tensor, slot: Tensor, relevant: Tensor) -> Tensor:
    """Which choices of ``head`` are legal, bool ``[N, n]``, given operations and slots ``[N]``.

    ``relevant`` is bool ``[N, 8]``, the rows of `RELEVANT` for ``op``; where a head is irrelevant only choice 0 is
    legal. For OP none of the three is read, for SLOT ``slot`` is not.
    """
    rows = torch.arange(masks.op.shape[0], device=masks.op.device)
    match head:
        case Head.OP:
            return masks.op
        case Head.SLOT:
            legal = masks.slot[rows, op]
        case Head.BLUEPRINT:
            legal = masks.blueprint[rows, slot]
        case Head.BLEND:
            legal = masks.blend
        case Head.TEMPO:
            legal = masks.tempo
        case Head.ALPHA_TARGET:
            legal = masks.alpha_target[rows, slot]
        case Head.ALPHA_SPEED:
            legal = masks.alpha_speed
        case Head.ALPHA_CURVE:
            legal = masks.alpha_curve
    first = torch.arange(legal.shape[-1], device=legal.device) == 0
    return torch.where(relevant[:, head, None], legal, first)


def open_heads(masks: MaskTensors, actions: Tensor, relevant: Tensor) -> Tensor:
    """Which heads had a choice in N rows, bool ``[N, 8]``: more than one was legal given the ``actions`` ``[N, 8]``.

    ``relevant`` is `RELEVANT` as a tensor, bool ``[ops, 8]``.
    """
    op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
    legal = [legal_choices(masks, head, op, slot, relevant[op]) for head in Head]
    return torch.stack([choices.sum(-1) > 1 for choices in legal], -1)


def masked_log_softmax(logits: Tensor, legal: Tensor) -> Tensor:
    """Log-probabilities ``[N, n]`` over the legal choices, in float32 whatever the precision of the logits."""
    return logits.float().masked_fill(~legal, ILLEGAL_LOGIT).log_softmax(-1)


def raised_to_floor(log_probs: Tensor, legal: Tensor, floor: float) -> Tensor:
    """Log-probabilities ``[N, n]`` mixed with the uniform distribution, so that no legal choice is below the floor.

    p' = (1 - k g) p + g for each of k legal choices, with g = min(floor, 1 / k) (Auer et al., "The nonstochastic
    multiarmed bandit problem", 2002, where g is gamma / K). Illegal choices stay impossible and a single legal one
    certain, and their gradients 0. A floor of 0 changes nothing.
    """
    if floor == 0:
        return log_probs
    probabilities, count = log_probs.exp(), legal.sum(-1, keepdim=True).to(log_probs.dtype)
    # Written so that a certain choice of one comes out as exactly 1.
    mixed = probabilities + count.reciprocal().clamp(max=floor) * (1 - count * probabilities)
    return torch.where(legal, mixed.log(), log_probs)


def normalised_entropy(log_probs: Tensor, legal: Tensor) -> Tensor:
    """Entropy ``[N]`` divided by log(number of legal choices): in 0..1, and 0 where there is only one."""
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return entropy / legal.sum(-1).clamp(min=2).to(entropy.dtype).log()


def draw(log_probs: Tensor, legal: Tensor, uniforms: Tensor) -> Tensor:
    """Choices int64 ``[N]`` by inverting the distribution at ``uniforms`` ``[N]`` in [0, 1].

    The first legal choice whose cumulated probability exceeds the uniform. An illegal one is never returned, however
    the sums round.
    """
    cumulated = log_probs.exp().cumsum(-1)
    level = uniforms.clamp(max=LARGEST_UNIFORM).unsqueeze(-1) * cumulated[..., -1:]
    reached = legal & (cumulated > level)
    # 2 where legal and reached, 1 where only legal; argmax takes the first among equals.
    return (legal.view(torch.uint8) + reached.view(torch.uint8)).argmax(-1)


def chosen(log_probs: Tensor, choice: Tensor) -> Tensor:
    """Log-probability ``[N]`` of the choice ``[N]`` under ``[N, n]``."""
    return log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
