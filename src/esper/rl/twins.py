"""Twins: networks that only wait, whose rewards tell what an instance pays without growth."""

from __future__ import annotations

import torch
from torch import Tensor


def minus_twin(reward: Tensor, twin_reward: Tensor, running: Tensor, gamma: float) -> Tensor:
    """Rewards ``[T, E]`` less those of each environment's twin ``[T, E]``, step by step.

    What a twin earns does not depend on the policy's actions. So from every step on a return is less by a number that
    they cannot change, a baseline (Williams, 1992) that leaves the policy gradient unbiased and takes away the variance
    that both share: a control variate (Greensmith, Bartlett and Baxter, 2004). That holds for episodes that end early
    too, where ``running``, bool ``[T, E]``, turns False: all that the twin earns afterwards counts at the last step, or
    else it would pay to end where the twin still earns.
    """
    goes_on = torch.cat((running[1:], torch.zeros_like(running[:1])))
    return reward - torch.where(goes_on, twin_reward, to_go(twin_reward, gamma))


def to_go(reward: Tensor, gamma: float) -> Tensor:
    """The discounted sum of the rewards ``[T, E]`` from each step on."""
    result = torch.empty_like(reward)
    following = torch.zeros_like(reward[0])
    for step in reversed(range(len(reward))):
        following = reward[step] + gamma * following
        result[step] = following
    return result
