"""A trained policy as a controller, and how it is read from what a training run has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import ConfigDict
from torch import Tensor

from esper.control.controller import Actions, UniformStreams
from esper.control.observation import Observation, list_features, mask_tensors
from esper.control.policy import Policy, PolicySettings
from esper.control.policy.network import PolicyState
from esper.control.promises import PromiseSettings
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.rules import Rules
from esper.settings import Settings
from esper.state import from_plain
from esper.state_files import take_prefix


class LearnedState(NamedTuple):
    """The policy's memory, and its random streams unless it is greedy."""

    memory: PolicyState
    streams: UniformStreams | None


class LearnedController:
    """Acts by a recurrent policy: the likeliest choices if ``greedy``, else drawn from its distributions.

    ``promise`` says how what blueprints promise was measured where the policy learned; None: it never saw any.
    """

    name = "policy"

    def __init__(self, policy: Policy, *, greedy: bool, promise: PromiseSettings | None = None) -> None:
        self.policy = policy
        self.greedy = greedy
        self.promise = promise

    def start(self, seeds: Sequence[int]) -> LearnedState:
        """Empty memories."""
        return LearnedState(self.policy.initial_state(len(seeds)), None if self.greedy else UniformStreams(seeds))

    def act(self, observation: Observation, masks: ActionMasks, state: LearnedState) -> tuple[Actions, LearnedState]:
        """One decision per network."""
        noise = None if state.streams is None else torch.from_numpy(state.streams.draw()).to(self.policy.device)
        tensors = mask_tensors(masks, self.policy.device)
        step = self.policy.act(observation.to(self.policy.device), tensors, state.memory, noise)
        return step.actions.cpu().numpy(), LearnedState(step.state, state.streams)


class ObservedConduct(Settings):
    """What a policy's observations depend on."""

    model_config = ConfigDict(extra="ignore")

    promise: PromiseSettings | None = None


class PolicyOrigin(Settings):
    """What the configuration of a run says of the policy that it trained; how it was trained is left out."""

    model_config = ConfigDict(extra="ignore")

    suite: str
    """The distribution of learning problems on which it was trained."""
    rules: Rules = Rules()
    """What may happen to seeds there."""
    policy: PolicySettings = PolicySettings()
    """Its sizes."""
    conduct: ObservedConduct = ObservedConduct()
    """How its episodes went."""


def restore_policy(
    tensors: Mapping[str, Tensor], settings: PolicySettings, promise: PromiseSettings | None
) -> LearnedController:
    """The policy in a checkpoint's ``tensors``, greedy, on the CPU, that saw ``promise`` where it learned.

    Raises:
        CheckpointError: they are of a policy with other settings.
    """
    policy = Policy(list_features(promise is not None).spec, settings, torch.Generator().manual_seed(0))
    saved = take_prefix("policy.", tensors)  # the others are the optimizer's and counters
    policy.load_state_dict(from_plain(policy.state_dict(), saved, "the checkpoint's policy"))
    return LearnedController(policy, greedy=True, promise=promise)
