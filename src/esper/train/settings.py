"""The configuration of a training run: one tree of the settings of all parts."""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from esper.config.settings import LARGEST_COUNT, MOST_AT_ONCE, Settings
from esper.control.policy import PolicySettings
from esper.engine.config import EpisodeConfig
from esper.engine.promises import PromiseSettings
from esper.lifecycle.rules import Rules
from esper.numerics.devices import CPU, DeviceName
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.population import Strategy
from esper.rl.diagnostics import HISTORY
from esper.rl.rewards import OUTCOME, RewardSpec
from esper.rl.settings import PPOSettings
from esper.tasks.registry import FIRST_UNSEEN, GENERATED, SHORTEST, get_suite


class TelemetrySettings(Settings):
    """How much of a run is recorded. It does not change the run.

    Changes of stage, verdicts of gates, rollbacks and the ends of episodes are always recorded, of all networks.
    """

    steps_every: int = Field(default=1, ge=0, le=LARGEST_COUNT)
    """Every how many iterations all decisions are recorded, with rewards and counterfactuals: half a kilobyte each.
    0: never."""
    watched: int = Field(default=4, ge=0, le=MOST_AT_ONCE)
    """Networks whose observations and probabilities of choices are recorded: some kilobytes per decision. They are
    spread evenly, and so over problems."""

    minibatches_after_anomaly: int = Field(default=3, ge=0, le=HISTORY)
    """Iterations after an anomaly of which every minibatch of the update is recorded in full: ratios, entropies,
    advantages and gradient norms of each head."""

    def records_steps(self, iteration: int) -> bool:
        """Whether the decisions of this iteration, counted from 1, are recorded."""
        return self.steps_every > 0 and (iteration - 1) % self.steps_every == 0

    def select_watched(self, environments: int) -> range:
        """The numbers of the watched networks among so many environments."""
        count = min(self.watched, environments)
        return range(0, environments, math.ceil(environments / count)) if count else range(0)


class TrainSettings(Settings):
    """How a growth controller is learned."""

    # The problems, and the policy to start from
    suite: str = "tokens"
    """The distribution of learning problems."""
    mix: tuple[str, ...] = ()
    """Further suites to learn on. Each shard then plays in each iteration a suite drawn from `suite` and these.
    `generated` stands for a new one of the generated suites every time. Episodes on them are not recorded as events;
    probes, evaluations and reports are on `suite`."""
    start_from: str | None = None
    """The directory of the run whose policy to start from; null: a new policy. Its settings under `policy` must be
    those of this run."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed from which all randomness of the run follows."""
    # The size of training, and how it is computed
    iterations: int = Field(default=20, ge=1, le=LARGEST_COUNT)
    """Rollouts, each followed by a policy update. A rollout is one whole episode in every environment."""
    environments: int = Field(default=128, ge=1, le=MOST_AT_ONCE)
    """Networks that grow side by side in a rollout."""
    shards: int = Field(default=2, ge=1, le=MOST_AT_ONCE)
    """Parts in which the environments are computed, each in its own process. Results do not depend on the machine's
    cores, but may differ in rounding for another number of shards."""
    devices: tuple[DeviceName, ...] = Field(default=(CPU,), min_length=1)
    """Where networks are computed, as torch names it: shard i on device i modulo their number. The policy learns on
    the first, and its measurements are made there. With Ray, `cuda` is the GPU that Ray lends to a task."""
    deterministic: bool = True
    """Compute so that a run can be repeated and resumed to the last bit, on GPUs too: with kernels that sum in a fixed
    order, and convolutions in full float32. false: the fastest kernels, and TF32 in convolutions; only with a device
    other than the CPU, which is always deterministic."""
    strategy: Strategy = "stacked"
    """How networks are run: as one stacked program, or looped. `auto`, which takes the faster one, is not allowed here:
    a run with it could not be reproduced."""
    networks_per_pass: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)
    """The most networks of a shard that are computed at once, if a device's memory does not hold them all; null: all
    of them. It changes results only in rounding."""
    examples_per_pass: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)
    """The most examples of a network that are computed at once, in training and in measurements, if memory does not
    hold a minibatch; null: all of them. Gradients of a minibatch's parts are added up before its step, which changes
    results only in rounding. Hosts with batch normalisation or dropout refuse it."""
    bf16: bool = False
    """Compute the networks' forward passes in bfloat16 where torch's autocast does, in training, validation,
    counterfactuals and tests. Parameters, optimizers, losses and promises stay in float32."""
    # Rewards, episodes, policy and learning
    reward: RewardSpec = (OUTCOME,)
    """How the controller is paid: a mode's name, its settings, or a list of either that groups of environments use in
    turns."""
    rules: Rules = Rules()
    """What may happen to seeds: the lifecycle's rules."""
    conduct: EpisodeConfig = EpisodeConfig()
    """The governor, caps on growth, and when episodes end early."""
    policy: PolicySettings = PolicySettings()
    """The policy's sizes, how it starts, and the floors of its probabilities."""
    ppo: PPOSettings = PPOSettings()
    """How the policy learns."""
    # Records, probes and checkpoints
    telemetry: TelemetrySettings = TelemetrySettings()
    """What the run store records of the growing networks."""
    probe_every: int = Field(default=10, ge=1, le=LARGEST_COUNT)
    """Iterations between measurements of the greedy policy on fixed instances."""
    probe_instances: int = Field(default=56, ge=1, le=MOST_AT_ONCE)
    """Fixed training instances on which the greedy policy and the baselines' level are measured during training."""
    checkpoint_every: int = Field(default=10, ge=1, le=LARGEST_COUNT)
    """Iterations between checkpoints."""
    keep_checkpoints: int = Field(default=3, ge=1, le=LARGEST_COUNT)
    """Checkpoints kept, the newest ones."""

    @field_validator("suite")
    @classmethod
    def _require_suite(cls, name: str) -> str:
        return get_suite(name).name

    @field_validator("mix")
    @classmethod
    def _require_mixed_suites(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name if name == GENERATED else get_suite(name).name for name in names)

    def draw_suite(self, iteration: int, shard: int) -> str:
        """The name of the suite that a shard plays in an iteration, counted from 0."""
        if not self.mix:
            return self.suite
        rng = numpy_generator(self.seed, iteration, shard, Stream.MIXED_SUITES)
        name = (self.suite, *self.mix)[int(rng.integers(len(self.mix) + 1))]
        return f"{GENERATED}:{rng.integers(FIRST_UNSEEN)}" if name == GENERATED else name

    @property
    def promise(self) -> PromiseSettings | None:
        """The settings by which promises are measured in rollouts; None: they are not."""
        return self.policy.resolve_promise(self.conduct.promise)

    @model_validator(mode="after")
    def _require_measured_slots(self) -> Self:
        if self.policy.advice is not None and self.conduct.promise is not None:
            raise ValueError(
                "promises are measured by the settings of the rule that advises the policy: set "
                "policy.advice.rule.promise instead of conduct.promise, or policy.advice to null"
            )
        # Every suite must leave enough decisions to measure all slots.
        measured = self.conduct.model_copy(update={"promise": self.promise})
        for name in (self.suite, *self.mix):
            measured.require_measurements(SHORTEST if name == GENERATED else get_suite(name).steps)
        return self

    @field_validator("strategy", mode="before")
    @classmethod
    def _require_fixed_strategy(cls, strategy: Any) -> Any:
        if strategy == "auto":
            raise ValueError(
                "auto depends on timings, so that equal settings would train differently in their last bits: set "
                "stacked or looped; `esper bench train --set strategy=looped` measures how fast one is here"
            )
        return strategy

    @field_validator("devices", mode="before")
    @classmethod
    def _accept_single_device(cls, devices: Any) -> Any:
        return (devices,) if isinstance(devices, str) else devices

    @model_validator(mode="after")
    def _require_choice_of_kernels(self) -> Self:
        if not self.deterministic and set(self.devices) == {CPU}:
            raise ValueError(
                "deterministic=false has no effect on the CPU, which has no other kernels: leave it out, or set devices"
            )
        return self

    @model_validator(mode="after")
    def _require_suitable_shards(self) -> Self:
        shards, size = self.shards, self.environments // self.shards
        if len(self.devices) > shards:
            raise ValueError(
                f"{len(self.devices)} devices have only {shards} shards to compute: raise shards or name fewer"
            )
        if self.environments % (shards * self.ppo.group):
            raise ValueError(
                f"environments ({self.environments}) must be a multiple of shards * ppo.group "
                f"({shards * self.ppo.group}), so that no group of environments on one instance is split between shards"
            )
        # In a mix each shard may be the only one of its shape, and the largest.
        if self.mix and size < self.ppo.minibatches:
            raise ValueError(
                f"with a mix, each shard's {size} environments must fill ppo.minibatches ({self.ppo.minibatches}): "
                "raise environments, or lower shards or ppo.minibatches"
            )
        return self
