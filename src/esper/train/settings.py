"""The configuration of a training run: one tree of the settings of all parts."""

import math
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from esper.config.settings import LARGEST_COUNT, MOST_AT_ONCE, Settings
from esper.control.policy import PolicySettings
from esper.engine.engine import GrowthConfig
from esper.growth.promise import PromiseSettings
from esper.lifecycle.rules import Rules
from esper.numerics.devices import CPU, DeviceName
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.population import Strategy
from esper.rl.ppo import PPOSettings
from esper.rl.rewards import OUTCOME, RewardSpec
from esper.tasks.registry import FIRST_UNSEEN, GENERATED, SHORTEST, get_suite

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
"""Files with settings for one purpose, by name; the first line of each says what it is for."""

HISTORY = 10
"""Number of updates that are remembered for trends, including the newest."""


class TelemetrySettings(Settings):
    """How much of a run is recorded. It does not affect training.

    Changes of stage, results of gates, rollbacks and ends of episodes are always recorded, for all networks.
    """

    steps_every: int = Field(default=1, ge=0, le=LARGEST_COUNT)
    """Iterations between recordings of all decisions, with rewards and counterfactuals (0.5 kB per decision); 0: never.
    """
    watched: int = Field(default=4, ge=0, le=MOST_AT_ONCE)
    """Number of networks, evenly spread over the environments, whose observations and action probabilities are recorded
    (a few kB per decision)."""

    minibatches_after_anomaly: int = Field(default=3, ge=0, le=HISTORY)
    """Number of iterations after an anomaly in which every minibatch of the update is recorded in full: ratios,
    entropies, advantages and gradient norms of each head."""

    def records_steps(self, iteration: int) -> bool:
        """Whether the decisions of an iteration, counted from 1, are recorded."""
        return self.steps_every > 0 and (iteration - 1) % self.steps_every == 0

    def select_watched(self, environments: int) -> range:
        """Indices of the watched networks among this number of environments."""
        count = min(self.watched, environments)
        return range(0, environments, math.ceil(environments / count)) if count else range(0)


class TrainSettings(Settings):
    """Settings of a training run of a growth controller."""

    # The problems, and the policy to start from
    suite: str = "tokens"
    """The distribution of learning problems."""
    mix: tuple[str, ...] = ()
    """Additional suites to train on. In each iteration, each shard plays a suite drawn from `suite` and these.
    `generated` means a new generated suite each time. Episodes on additional suites are not recorded as events; probes,
    evaluations and reports use only `suite`."""
    start_from: str | None = None
    """Directory of a run whose policy to start from, with the same settings under `policy`; null: a new policy."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed of the run."""
    # The size of training, and how it is computed
    iterations: int = Field(default=20, ge=1, le=LARGEST_COUNT)
    """Number of rollouts, each followed by a policy update. A rollout is one full episode in every environment."""
    environments: int = Field(default=128, ge=1, le=MOST_AT_ONCE)
    """Number of networks grown in parallel in a rollout."""
    shards: int = Field(default=2, ge=1, le=MOST_AT_ONCE)
    """Number of groups of environments, each computed in its own process. Results do not depend on the number of cores,
    but another number of shards may change rounding."""
    devices: tuple[DeviceName, ...] = Field(default=(CPU,), min_length=1)
    """Torch devices of the networks; shard i uses device i modulo their number. The policy is trained and measured on
    the first. With Ray, `cuda` is the GPU assigned to the task."""
    deterministic: bool = True
    """Use deterministic kernels and full float32 convolutions, so that runs can be repeated and resumed bit for bit, on
    GPUs too. false: the fastest kernels, and TF32 in convolutions; requires a device other than the CPU, which is
    always deterministic."""
    strategy: Strategy = "stacked"
    """Run networks as one stacked program or in a loop. `auto` (the faster one) is not allowed, since such a run could
    not be reproduced."""
    networks_per_pass: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)
    """Maximum number of a shard's networks computed at once, to limit memory; null: all. Changes only rounding."""
    examples_per_pass: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)
    """Maximum number of a network's examples computed at once, to limit memory; null: all. Gradients are accumulated
    over the parts of a minibatch, which changes only rounding. Not possible for hosts with batch normalisation or
    dropout."""
    bf16: bool = False
    """Run forward passes of networks in bfloat16 by torch's autocast, in training, validation, counterfactuals and
    tests. Parameters, optimizers, losses and promises stay in float32."""
    # Rewards, episodes, policy and learning
    reward: RewardSpec = (OUTCOME,)
    """Reward: name of a mode, or its settings."""
    rules: Rules = Rules()
    """Lifecycle rules: which operations on seeds are allowed, and when."""
    growth: GrowthConfig = GrowthConfig()
    """Governor, budget of growth, and early ends of episodes."""
    policy: PolicySettings = PolicySettings()
    """Sizes of the policy, its initialisation, and minimum probabilities."""
    ppo: PPOSettings = PPOSettings()
    """Hyperparameters of PPO."""
    # Records, probes and checkpoints
    telemetry: TelemetrySettings = TelemetrySettings()
    """What is recorded about the growing networks."""
    probe_every: int = Field(default=10, ge=1, le=LARGEST_COUNT)
    """Iterations between measurements of the greedy policy on fixed instances."""
    probe_instances: int = Field(default=56, ge=1, le=MOST_AT_ONCE)
    """Number of fixed training instances for measuring the greedy policy and the baselines during training."""
    checkpoint_every: int = Field(default=10, ge=1, le=LARGEST_COUNT)
    """Iterations between checkpoints."""
    keep_checkpoints: int = Field(default=3, ge=1, le=LARGEST_COUNT)
    """Number of newest checkpoints to keep."""

    @field_validator("suite")
    @classmethod
    def _require_suite(cls, name: str) -> str:
        return get_suite(name).name

    @field_validator("mix")
    @classmethod
    def _require_mixed_suites(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name if name == GENERATED else get_suite(name).name for name in names)

    @field_validator("reward")
    @classmethod
    def _require_one_reward(cls, reward: RewardSpec) -> RewardSpec:
        if len(reward) > 1:
            raise ValueError(
                "a policy does not observe which of several rewards it is paid: give one, and compare rewards with "
                "`esper compare`"
            )
        return reward

    def draw_suite(self, iteration: int, shard: int) -> str:
        """Name of the suite that a shard uses in an iteration; iterations count from 0."""
        if not self.mix:
            return self.suite
        rng = numpy_generator(self.seed, iteration, shard, Stream.MIXED_SUITES)
        name = (self.suite, *self.mix)[int(rng.integers(len(self.mix) + 1))]
        return f"{GENERATED}:{rng.integers(FIRST_UNSEEN)}" if name == GENERATED else name

    @property
    def promise(self) -> PromiseSettings | None:
        """How promises are measured in rollouts; None: not at all."""
        return self.policy.resolve_promise(self.growth.promise)

    @model_validator(mode="after")
    def _require_measured_slots(self) -> Self:
        if self.policy.advice is not None and self.growth.promise is not None:
            raise ValueError(
                "the rule that advises the policy has its own promise settings: set policy.advice.rule.promise instead "
                "of growth.promise, or policy.advice to null"
            )
        # Every suite must leave enough decisions to measure all slots.
        measured = self.growth.model_copy(update={"promise": self.promise})
        for name in (self.suite, *self.mix):
            measured.require_measurements(SHORTEST if name == GENERATED else get_suite(name).steps)
        return self

    @field_validator("strategy", mode="before")
    @classmethod
    def _require_fixed_strategy(cls, strategy: Any) -> Any:
        if strategy == "auto":
            raise ValueError(
                "auto depends on timings, so equal settings would differ in rounding: set stacked or looped, and "
                "compare the seconds of an iteration"
            )
        return strategy

    @field_validator("devices", mode="before")
    @classmethod
    def _accept_single_device(cls, devices: Any) -> Any:
        return (devices,) if isinstance(devices, str) else devices

    @model_validator(mode="after")
    def _require_choice_of_kernels(self) -> Self:
        if not self.deterministic and set(self.devices) == {CPU}:
            raise ValueError("deterministic=false has no effect on the CPU: remove it, or set devices")
        return self

    @model_validator(mode="after")
    def _require_suitable_shards(self) -> Self:
        shards, size = self.shards, self.environments // self.shards
        if len(self.devices) > shards:
            raise ValueError(
                f"{len(self.devices)} devices for only {shards} shards: raise shards or name fewer devices"
            )
        if self.environments % (shards * self.ppo.group):
            raise ValueError(
                f"environments ({self.environments}) must be a multiple of shards * ppo.group "
                f"({shards * self.ppo.group}), so that no group of environments on one instance is split between shards"
            )
        # In a mix, each shard may be the only one of its shape, so it must have enough environments by itself.
        if self.mix and size < self.ppo.minibatches:
            raise ValueError(
                f"with a mix, each shard's {size} environments must fill ppo.minibatches ({self.ppo.minibatches}): "
                "raise environments, or lower shards or ppo.minibatches"
            )
        return self
