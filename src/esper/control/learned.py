"""A trained policy as a controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from esper.control.controller import Actions, UniformStreams
from esper.control.observation import Observation, mask_tensors
from esper.control.policy import Policy
from esper.control.policy.network import PolicyState
from esper.lifecycle.legality import ActionMasks


class LearnedState(NamedTuple):
    """The policy's memory, and its random streams unless it is greedy."""

    memory: PolicyState
    streams: UniformStreams | None


class LearnedController:
    """Acts by a recurrent policy: the likeliest choices if ``greedy``, else drawn from its distributions."""

    name = "policy"

    def __init__(self, policy: Policy, *, greedy: bool) -> None:
        self.policy = policy
        self.greedy = greedy

    def start(self, seeds: Sequence[int]) -> LearnedState:
        """Empty memories."""
        return LearnedState(self.policy.initial_state(len(seeds)), None if self.greedy else UniformStreams(seeds))

    def act(self, observation: Observation, masks: ActionMasks, state: LearnedState) -> tuple[Actions, LearnedState]:
        """One decision per network."""
        noise = None if state.streams is None else torch.from_numpy(state.streams.draw()).to(self.policy.device)
        tensors = mask_tensors(masks, self.policy.device)
        step = self.policy.act(observation.to(self.policy.device), tensors, state.memory, noise)
        return step.actions.cpu().numpy(), LearnedState(step.state, state.streams)
