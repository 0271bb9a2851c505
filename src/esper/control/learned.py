"""A trained policy as a controller, and how it is restored from a training run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ConfigDict
from torch import Tensor

from esper.config.settings import Settings
from esper.control.advice import ADVICE_NAMES, append_advice
from esper.control.controller import Actions, UniformStreams
from esper.control.policy import Policy, PolicySettings
from esper.control.policy.heads import NON_NEGATIVE
from esper.control.policy.network import PolicyState
from esper.control.rules import LookRule, LookSettings
from esper.engine.observation import Observation, ObservationSpec, list_features, make_mask_tensors
from esper.errors import ConfigError, did_you_mean
from esper.growth.promise import PromiseSettings
from esper.lifecycle.rules import ActionMasks, Rules
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints, from_plain, require_in_range, strip_prefix

POLICY = "policy"
"""The name of a run's policy in results."""
UNTRAINED = "untrained"
"""The name of the same policy before training, with its first weights, in results and levels."""
SAMPLED = "sampled"
"""The name of the policy that draws its choices instead of taking the likeliest, in results."""


class LearnedState(NamedTuple):
    """The memory of the policy, and its random streams unless it is greedy."""

    memory: PolicyState
    streams: UniformStreams | None


class LearnedController:
    """Acts by a recurrent policy: the likeliest choices if ``greedy``, else drawn from its distributions.

    Args:
        promise: How promise was measured where the policy learned; None: it never was. An advisor's own counts instead.
        advisor: The rule that advises the policy, if its settings have advice.
        rules: The rules under which the policy learned: its heads are not trained for other choices. None: all that is
            legal.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        greedy: bool,
        promise: PromiseSettings | None = None,
        advisor: LookRule | None = None,
        rules: Rules | None = None,
        name: str = POLICY,
    ) -> None:
        if (advisor is None) != (policy.settings.advice is None):
            raise ConfigError("a policy has an advisor if, and only if, its settings have advice")
        self.name = name
        self.policy = policy
        self.greedy = greedy
        self.promise = promise if advisor is None else advisor.promise
        self._advisor = advisor
        self._rules = rules

    def start(self, seeds: Sequence[int]) -> LearnedState:
        """Empty memories."""
        return LearnedState(self.policy.initial_state(len(seeds)), None if self.greedy else UniformStreams(seeds))

    def act(self, observation: Observation, masks: ActionMasks, state: LearnedState) -> tuple[Actions, LearnedState]:
        """One decision per network."""
        device = self.policy.device
        masks = masks if self._rules is None else masks.narrow(self._rules)
        if self._advisor is not None:
            observation = append_advice(self._advisor, observation, masks)
        noise = None if state.streams is None else torch.from_numpy(state.streams.draw()).to(device, non_blocking=True)
        step = self.policy.act(observation.to(device), make_mask_tensors(masks, device), state.memory, noise)
        return step.actions.cpu().numpy(), LearnedState(step.state, state.streams)


def count_policy_features(settings: PolicySettings, promise: PromiseSettings | None) -> ObservationSpec:
    """The number of features in each part of what a policy with these settings observes; see `name_features`."""
    return ObservationSpec(*map(len, name_features(settings, promise).values()))


def name_features(settings: PolicySettings, promise: PromiseSettings | None) -> dict[str, list[str]]:
    """Names of a policy's features by the part of the observation: observed ones, then those of advice.

    ``promise``: how promise is measured for the policy; None: it is not, and has no features.
    """
    observed = list_features(promise is not None)._asdict()
    advice = ((), (), ()) if settings.advice is None else ADVICE_NAMES
    return {
        part: [*(feature.name for feature in features), *names]
        for (part, features), names in zip(observed.items(), advice, strict=True)
    }


class ObservedGrowth(Settings):
    """The settings of episodes that a policy's observations depend on."""

    model_config = ConfigDict(extra="ignore")

    promise: PromiseSettings | None = None


class PolicyOrigin(Settings):
    """The part of a run's configuration that describes its policy, without how it was trained."""

    model_config = ConfigDict(extra="ignore")

    suite: str
    """The suite on which it was trained."""
    mix: tuple[str, ...] = ()
    """Further suites, as in the settings of training."""
    rules: Rules = Rules()
    """The rules of the lifecycle there."""
    policy: PolicySettings = PolicySettings()
    """The policy's sizes."""
    growth: ObservedGrowth = ObservedGrowth()
    """The part of the run's `GrowthConfig` that the policy's observations depend on."""

    @property
    def promise(self) -> PromiseSettings | None:
        """How promise was measured for the policy."""
        return self.policy.resolve_promise(self.growth.promise)


def open_policy(name: str, rules: Sequence[str] = ()) -> RunDirectory:
    """The run of `esper train` in the directory ``name``, whose policy is to be loaded.

    ``rules``: the names of rules, where the caller accepts these and controllers in files too, for the message.
    """
    if Path(name).is_dir():
        return RunDirectory.open_training_run(Path(name))
    if not rules:
        raise ConfigError(f"no policy {name!r}: give the directory of a run of `esper train`")
    raise ConfigError(
        f"no controller {name!r}{did_you_mean(name, rules)}: give one of {', '.join(rules)}, the directory of a run of "
        "`esper train`, or FILE.py:NAME of a controller of your own"
    )


def restore_controller(
    run: RunDirectory, origin: PolicyOrigin, make_advisor: Callable[[LookSettings], LookRule], name: str = POLICY
) -> LearnedController:
    """The newest policy of a run as a greedy controller; ``make_advisor`` makes the rule that advises it, if any."""
    tensors = Checkpoints(run.checkpoints).latest().tensors
    policy = restore_policy(tensors, origin.policy, origin.promise, origin.rules)
    advice = origin.policy.advice
    advisor = None if advice is None else make_advisor(advice.rule)
    return LearnedController(
        policy, greedy=True, promise=origin.promise, advisor=advisor, rules=origin.rules, name=name
    )


def restore_policy(
    tensors: Mapping[str, Tensor], settings: PolicySettings, promise: PromiseSettings | None, rules: Rules
) -> Policy:
    """The policy in a checkpoint's ``tensors``, on the CPU, with the settings, promise and rules of its training."""
    # The first weights are overwritten, so their generator does not matter.
    spec = count_policy_features(settings, promise)
    policy = Policy(spec, settings, torch.Generator().manual_seed(0), rules.closed_heads)
    saved = policy.drop_closed_heads(strip_prefix("policy.", tensors))  # the others are the optimizer's, or counters
    values = from_plain(policy.state_dict(), saved, "the checkpoint's policy")
    require_in_range(values, "the checkpoint's policy", NON_NEGATIVE)
    policy.load_state_dict(values)
    return policy
