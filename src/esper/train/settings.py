"""The configuration of a training run: one tree of the rooms' own settings."""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from esper.config.settings import Settings
from esper.control.policy import PolicySettings
from esper.engine.config import EpisodeConfig
from esper.engine.promises import PromiseSettings
from esper.lifecycle.rules import Rules
from esper.numerics.devices import CPU, DeviceName
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.population import Strategy
from esper.rl.rewards import OUTCOME, RewardSpec
from esper.rl.settings import PPOSettings
from esper.tasks.registry import FIRST_UNSEEN, GENERATED, SHORTEST, get_suite


class TelemetrySettings(Settings):
    """How fully is told what happens. None of it changes what does.

    Changes of stage, verdicts of gates, rollbacks and how episodes end are always kept, of all networks.
    """

    steps_every: int = Field(default=1, ge=0)
    """Iterations between those whose every decision is kept, with rewards and counterfactuals: half a kilobyte each.
    0: none."""
    watched: int = Field(default=4, ge=0)
    """Networks of which is kept what the policy saw and how likely it found each choice: some kilobytes per decision.
    They are spread evenly, and so over problems."""

    def records_steps(self, iteration: int) -> bool:
        """Whether the decisions of that iteration, from 1, are kept."""
        return self.steps_every > 0 and (iteration - 1) % self.steps_every == 0

    def select_watched(self, environments: int) -> range:
        """Numbers of the watched ones of so many environments."""
        count = min(self.watched, environments)
        return range(0, environments, math.ceil(environments / count)) if count else range(0)


class TrainSettings(Settings):
    """How a growth controller is learned."""

    suite: str = "tokens"
    """The distribution of learning problems."""
    mix: tuple[str, ...] = ()
    """Further suites to learn on: then each shard plays in each iteration one that is drawn from `suite` and these.
    `generated` stands for a new one of the generated suites every time. What is played on them is not told as events;
    probes, evaluations and reports are of `suite`."""
    start_from: str | None = None
    """Whose policy learns on: `esper`, which comes with Esper, or the directory of a run; null: a new one. Its
    settings under `policy` must be those of this run."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """All randomness of the run follows from it."""
    iterations: int = Field(default=20, ge=1)
    """Rollouts, each followed by a policy update. A rollout is one whole episode in every environment."""
    environments: int = Field(default=128, ge=1)
    """Networks that grow side by side in a rollout."""
    shards: int = Field(default=2, ge=1)
    """Parts the environments are computed in, each in a process of its own. Results do not depend on the machine's
    cores, but may differ in rounding for another number of shards."""
    devices: tuple[DeviceName, ...] = Field(default=(CPU,), min_length=1)
    """Where networks are computed, as torch names it: shard i on device i modulo their number. The policy learns on
    the first, and its measurements are made there. With Ray, `cuda` is the GPU that Ray lends to a task."""
    strategy: Strategy = "stacked"
    """How networks are run: as one stacked program, or looped. Elsewhere `auto` takes whichever is faster, which a run
    must not: it would not repeat itself."""
    networks_per_pass: int | None = Field(default=None, ge=1)
    """The most networks of a shard that are computed at once, where a device's memory does not hold them all; null: all
    of them. It changes no result but in rounding."""
    reward: RewardSpec = (OUTCOME,)
    """How the controller is paid: a mode's name, its settings, or a list of either that groups of environments use in
    turns."""
    rules: Rules = Rules()
    """What may happen to seeds."""
    conduct: EpisodeConfig = EpisodeConfig()
    """The governor, caps on growth, and when episodes end early."""
    policy: PolicySettings = PolicySettings()
    """The policy's sizes, how it starts, and the floors of its probabilities."""
    ppo: PPOSettings = PPOSettings()
    """How the policy learns."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """What the run store keeps of the growing networks."""
    probe_every: int = Field(default=10, ge=1)
    """Iterations between measurements of the greedy policy on fixed instances."""
    probe_instances: int = Field(default=56, ge=1)
    """Fixed training instances on which the greedy policy and the baselines' level are measured during training."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Iterations between checkpoints."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Checkpoints kept, the newest ones."""

    @field_validator("suite")
    @classmethod
    def _suite_exists(cls, name: str) -> str:
        return get_suite(name).name

    @field_validator("mix")
    @classmethod
    def _mixed_suites_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name if name == GENERATED else get_suite(name).name for name in names)

    def draw_suite(self, iteration: int, shard: int) -> str:
        """Name of the suite that a shard plays in the iteration of that number, from 0."""
        if not self.mix:
            return self.suite
        rng = numpy_generator(self.seed, iteration, shard, Stream.MIXED_SUITES)
        name = (self.suite, *self.mix)[int(rng.integers(len(self.mix) + 1))]
        return f"{GENERATED}:{rng.integers(FIRST_UNSEEN)}" if name == GENERATED else name

    @property
    def promise(self) -> PromiseSettings | None:
        """How what blueprints promise is measured in rollouts."""
        return self.policy.resolve_promise(self.conduct.promise)

    @model_validator(mode="after")
    def _slots_are_measured(self) -> Self:
        if self.policy.advice is not None and self.conduct.promise is not None:
            raise ValueError(
                "promises are measured as the rule that advises the policy wishes: set policy.advice.rule.promise "
                "instead of conduct.promise, or policy.advice to null"
            )
        measured = self.conduct.model_copy(update={"promise": self.promise})
        for name in (self.suite, *self.mix):
            measured.require_measurements(SHORTEST if name == GENERATED else get_suite(name).steps)
        return self

    @field_validator("strategy", mode="before")
    @classmethod
    def _strategy_is_named(cls, strategy: Any) -> Any:
        if strategy == "auto":
            raise ValueError(
                "auto goes by the clock, so that equal settings would train differently in their last bits: name "
                "stacked or looped; `esper bench train --set strategy=looped` says how fast one is here"
            )
        return strategy

    @field_validator("devices", mode="before")
    @classmethod
    def _several_or_one(cls, named: Any) -> Any:
        return (named,) if isinstance(named, str) else named

    @model_validator(mode="after")
    def _devices_are_used(self) -> Self:
        if len(self.devices) > self.shards:
            raise ValueError(
                f"{len(self.devices)} devices have only {self.shards} shards to compute: raise shards or name fewer"
            )
        return self

    @model_validator(mode="after")
    def _environments_divide(self) -> Self:
        part = self.shards * self.ppo.group
        if self.environments % part:
            raise ValueError(
                f"environments ({self.environments}) must be a multiple of shards * ppo.group ({part}), "
                "so that every group of environments on one instance is whole in its shard"
            )
        return self

    @model_validator(mode="after")
    def _shards_fill_minibatches(self) -> Self:
        """In a mix each shard may be the only one of its shape, and the largest."""
        own = self.environments // self.shards
        if self.mix and own < self.ppo.minibatches:
            raise ValueError(
                f"with a mix, each shard's {own} environments must fill ppo.minibatches ({self.ppo.minibatches}): "
                "raise environments, or lower shards or ppo.minibatches"
            )
        return self
