"""Advantages: how much better a step turned out than expected, less what does not depend on the action."""

from __future__ import annotations

import torch
from torch import Tensor


def generalised_advantages(
    rewards: Tensor, values: Tensor, final_values: Tensor, running: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimates ``[T, E]`` (Schulman et al., 2016) of aligned episodes.

    A_t = sum_k (gamma lam)^k d_{t+k} with d_t = r_t + gamma V_{t+1} - V_t, where V_T is ``final_values`` ``[E]``: 0
    where the episode terminated, the value of the state after the last step where it was cut. ``rewards`` and
    ``values`` are ``[T, E]``. After its end, where ``running``, bool ``[T, E]``, is False, nothing is earned and
    nothing expected: advantages there are 0.
    """
    rewards, values = rewards * running, values * running
    final_values = final_values * running[-1]
    following = torch.cat((values[1:], final_values[None]))
    return discounted_returns(rewards + gamma * following - values, gamma * lam)


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """The discounted sum ``[T, E]`` of the rewards ``[T, E]`` from each step on."""
    result = torch.empty_like(rewards)
    following = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        following = rewards[step] + gamma * following
        result[step] = following
    return result


def subtract_group_mean(advantages: Tensor, group: int) -> Tensor:
    """Subtract from each environment's advantage ``[T, E]`` the mean of the others in its group, step by step.

    Environments i*group .. (i+1)*group - 1 work on the same instance, so the others' mean says how good this instance
    turns out to be under the policy. It does not depend on the environment's own actions, so it adds no bias.
    ``group`` is at least 2 and divides E.
    """
    grouped = advantages.reshape(advantages.shape[0], -1, group)
    others = (grouped.sum(-1, keepdim=True) - grouped) / (group - 1)
    return (grouped - others).reshape(advantages.shape)


def subtract_control_variate(rewards: Tensor, control_variate: Tensor, running: Tensor, gamma: float) -> Tensor:
    """Rewards ``[T, E]`` less those that a network earned that only waited on the same instance, ``[T, E]``.

    What that network, each environment's twin, earns does not depend on the policy's actions. So from every step on a
    return is less by a number that they cannot change, a baseline (Williams, 1992) that leaves the policy gradient
    unbiased and takes away the variance that both share: a control variate (Greensmith, Bartlett and Baxter, 2004).
    That holds for episodes that end early too, where ``running``, bool ``[T, E]``, turns False: all that the twin earns
    afterwards counts at the last step, or else it would pay to end where the twin still earns.
    """
    goes_on = torch.cat((running[1:], torch.zeros_like(running[:1])))
    return rewards - torch.where(goes_on, control_variate, discounted_returns(control_variate, gamma))
