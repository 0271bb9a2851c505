"""A trained policy as a controller, and how it is read from what a training run has saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import ConfigDict
from torch import Tensor

from esper.config.settings import Settings
from esper.control.advice import ADVICE_NAMES, append_advice
from esper.control.controller import Actions, UniformStreams
from esper.control.policy import Policy, PolicySettings
from esper.control.policy.network import PolicyState
from esper.control.rules import LookRule, LookSettings
from esper.engine.observation import Observation, ObservationSpec, list_features, make_mask_tensors
from esper.engine.promises import PromiseSettings
from esper.errors import ConfigError
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.rules import Rules
from esper.runs.run_directory import RunDirectory
from esper.serialization.checkpoints import Checkpoints
from esper.serialization.state_files import from_plain, strip_prefix

POLICY = "policy"
"""What results call the policy of a run."""


class LearnedState(NamedTuple):
    """The policy's memory, and its random streams unless it is greedy."""

    memory: PolicyState
    streams: UniformStreams | None


class LearnedController:
    """Acts by a recurrent policy: the likeliest choices if ``greedy``, else drawn from its distributions.

    ``promise`` says how what blueprints promise was measured where the policy learned; None: it never saw any.
    A policy that is advised needs the ``advisor``, whose own `promise` counts then. ``name`` is what results call it.

    Raises:
        ConfigError: the policy's settings want an advisor and there is none, or the other way round.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        greedy: bool,
        promise: PromiseSettings | None = None,
        advisor: LookRule | None = None,
        name: str = POLICY,
    ) -> None:
        if (advisor is None) != (policy.settings.advice is None):
            raise ConfigError("a policy has an advisor if, and only if, its settings have advice")
        self.name = name
        self.policy = policy
        self.greedy = greedy
        self.promise = promise if advisor is None else advisor.promise
        self._advisor = advisor

    def start(self, seeds: Sequence[int]) -> LearnedState:
        """Empty memories."""
        return LearnedState(self.policy.initial_state(len(seeds)), None if self.greedy else UniformStreams(seeds))

    def act(self, observation: Observation, masks: ActionMasks, state: LearnedState) -> tuple[Actions, LearnedState]:
        """One decision per network."""
        seen = observation if self._advisor is None else append_advice(self._advisor, observation, masks)
        noise = None if state.streams is None else torch.from_numpy(state.streams.draw()).to(self.policy.device)
        tensors = make_mask_tensors(masks, self.policy.device)
        step = self.policy.act(seen.to(self.policy.device), tensors, state.memory, noise)
        return step.actions.cpu().numpy(), LearnedState(step.state, state.streams)


def count_policy_features(settings: PolicySettings, promise: PromiseSettings | None) -> ObservationSpec:
    """How many features a policy with these settings sees where ``promise`` is measured so, or not at all."""
    return ObservationSpec(*map(len, name_features(settings, promise).values()))


def name_features(settings: PolicySettings, promise: PromiseSettings | None) -> dict[str, list[str]]:
    """Names of the features that a policy sees, by the part of the observation."""
    seen = list_features(promise is not None)
    advised = ((), (), ()) if settings.advice is None else ADVICE_NAMES
    named = zip(seen._asdict().items(), advised, strict=True)
    return {part: [*(feature.name for feature in features), *added] for (part, features), added in named}


class ObservedConduct(Settings):
    """What a policy's observations depend on."""

    model_config = ConfigDict(extra="ignore")

    promise: PromiseSettings | None = None


class PolicyOrigin(Settings):
    """What the configuration of a run says of the policy that it trained; how it was trained is left out."""

    model_config = ConfigDict(extra="ignore")

    suite: str
    """The distribution of learning problems on which it was trained."""
    mix: tuple[str, ...] = ()
    """Further ones, as in the settings of training."""
    rules: Rules = Rules()
    """What may happen to seeds there."""
    policy: PolicySettings = PolicySettings()
    """Its sizes."""
    conduct: ObservedConduct = ObservedConduct()
    """How its episodes went."""

    @property
    def promise(self) -> PromiseSettings | None:
        """How what is promised was measured for it."""
        return self.policy.resolve_promise(self.conduct.promise)


def restore_controller(
    run: RunDirectory, origin: PolicyOrigin, advisor_of: Callable[[LookSettings], LookRule], name: str = POLICY
) -> LearnedController:
    """The newest policy of a run, greedy; ``advisor_of`` makes the rule that advises it, where one does.

    Raises:
        CheckpointError: there is no usable checkpoint, or it is of a policy with other settings.
    """
    policy = restore_policy(Checkpoints(run.checkpoints).latest().tensors, origin.policy, origin.promise)
    advice = origin.policy.advice
    advisor = None if advice is None else advisor_of(advice.rule)
    return LearnedController(policy, greedy=True, promise=origin.promise, advisor=advisor, name=name)


def restore_policy(tensors: Mapping[str, Tensor], settings: PolicySettings, promise: PromiseSettings | None) -> Policy:
    """The policy in a checkpoint's ``tensors``, on the CPU, that saw ``promise`` where it learned.

    Raises:
        CheckpointError: they are of a policy with other settings.
    """
    policy = Policy(count_policy_features(settings, promise), settings, torch.Generator().manual_seed(0))
    saved = strip_prefix("policy.", tensors)  # the others are the optimizer's and counters
    policy.load_state_dict(from_plain(policy.state_dict(), saved, "the checkpoint's policy"))
    return policy
