"""Sizes and initialisation of the learned controller, and the floors of its probabilities."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from esper.config.settings import Settings
from esper.control.advice import AdviceSettings
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import Head, Op, PerHead


class OpPrior(Settings):
    """Initial logits of the operations, all 0 by default. Useful for policies without advice.

    With 1.5 for wait, 1 for fossilize and -2 for prune, an untrained policy with all of them legal waits with
    probability 0.54, germinates with 0.12, fossilizes with 0.33 and prunes with 0.02. This gives seeds time to learn; a
    uniform policy would prune nearly all of them at once.
    """

    wait: float = Field(default=0.0, allow_inf_nan=False)
    germinate: float = Field(default=0.0, allow_inf_nan=False)
    advance: float = Field(default=0.0, allow_inf_nan=False)
    set_alpha: float = Field(default=0.0, allow_inf_nan=False)
    fossilize: float = Field(default=0.0, allow_inf_nan=False)
    prune: float = Field(default=0.0, allow_inf_nan=False)

    @property
    def by_op(self) -> tuple[float, ...]:
        """The logits in the order of `Op`."""
        logits = self.model_dump()
        return tuple(logits[op.name.lower()] for op in Op)


class PolicySettings(Settings):
    """Sizes and initialisation of the recurrent policy, and minimum probabilities.

    All are independent of the number of slots and blueprints. The policy has heads for operation, slot and blueprint,
    and for every other part of an action for which the lifecycle rules allow more than one choice.
    """

    hidden: int = Field(default=128, ge=4, le=4096)
    """Units of the LSTM; the main cost of an update."""

    width: int = Field(default=64, ge=4, le=2048)
    """Width of slot tokens, blueprint embeddings and pointer queries; a multiple of `attention_heads`."""

    attention_heads: int = Field(default=2, ge=1, le=32)
    """Heads of the self-attention across slots."""

    memory: int = Field(default=30, ge=2, le=100_000)
    """Longest dependency, in steps, for which the LSTM's gates are initialised; about the length of an episode."""

    head_gain: float = Field(default=0.01, gt=0, le=1)
    """Gain of the last layer of each action head. Small values make the untrained policy nearly uniform."""

    advice: AdviceSettings | None = AdviceSettings()
    """Rule whose choices the policy observes, and initially prefers; null: no advice."""

    op_prior: OpPrior = OpPrior()
    """Initial logits of the operations, added to those of advice."""

    probability_floor: PerHead = PerHead.fill(0.0)
    """Minimum probability of each of n legal choices of a head, below 0.5 and at most 1 / n; 0: none. The policy's
    distributions are mixed with uniform ones, in acting and in learning; a greedy policy ignores it. One number for all
    heads, or a mapping from heads to numbers."""

    def resolve_promise(self, default: PromiseSettings | None) -> PromiseSettings | None:
        """How promise is measured for the policy: as its advisor needs it, or without one as in ``default``."""
        return default if self.advice is None else self.advice.rule.promise

    @field_validator("probability_floor")
    @classmethod
    def _check_floors(cls, floor: PerHead) -> PerHead:
        for head, number in zip(Head, floor.by_head, strict=True):
            if number >= 0.5:
                raise ValueError(f"{number} for {head.name.lower()} leaves nothing to choose: set it below 0.5")
        return floor

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.width % self.attention_heads:
            raise ValueError(f"width {self.width} is not a multiple of attention_heads {self.attention_heads}")
        return self
