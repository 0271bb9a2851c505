"""Advantages: how much better a step turned out than expected."""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(
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
    errors = rewards + gamma * following - values
    result = torch.empty_like(errors)
    running = torch.zeros_like(final_values)
    for step in reversed(range(errors.shape[0])):
        running = errors[step] + gamma * lam * running
        result[step] = running
    return result


def minus_group_mean(advantage: Tensor, group: int) -> Tensor:
    """Subtract from each environment's advantage ``[T, E]`` the mean of the others in its group, step by step.

    Environments i*group .. (i+1)*group - 1 work on the same instance, so the others' mean says how good this instance
    turns out to be under the policy. It does not depend on the environment's own actions, so it adds no bias.
    ``group`` is at least 2 and divides E.
    """
    grouped = advantage.reshape(advantage.shape[0], -1, group)
    others = (grouped.sum(-1, keepdim=True) - grouped) / (group - 1)
    return (grouped - others).reshape(advantage.shape)
