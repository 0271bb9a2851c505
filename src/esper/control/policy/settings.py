"""How large the learned controller is, how it starts, and how sure of itself it may become."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from esper.config.settings import Settings
from esper.control.advice import AdviceSettings
from esper.engine.promises import PromiseSettings
from esper.lifecycle.actions import Head, Op, PerHead


class OpPrior(Settings):
    """First logits of the operations, flat by default: they are for policies that nobody advises.

    With 1.5 for wait, 1 for fossilize and -2 for prune, set by hand, an untrained policy for which all of them are
    legal waits with probability .54, germinates with .12, fossilizes with .33 and prunes with .02: what it germinates
    has time to show its worth, where a uniform one would prune nearly everything at once.
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
    """Sizes and initialisation of the recurrent policy, and the floors of its probabilities.

    None of them depends on the number of slots or blueprints.
    """

    hidden: int = Field(default=128, ge=4, le=4096)
    """Units of the LSTM: the main cost of an update."""

    width: int = Field(default=64, ge=4, le=2048)
    """Width of slot tokens, blueprint embeddings and pointer queries; a multiple of `attention_heads`."""

    attention_heads: int = Field(default=2, ge=1, le=32)
    """Heads of the self-attention across slots."""

    memory: int = Field(default=30, ge=2, le=100_000)
    """Longest dependency, in steps, that the LSTM's gates are initialised for: about an episode's length."""

    head_gain: float = Field(default=0.01, gt=0, le=1)
    """Gain of the last layer of each action head: small, so that the first policy is nearly uniform."""

    advice: AdviceSettings | None = AdviceSettings()
    """The rule whose choices the policy sees, and prefers before it has learned anything; null: nobody advises it."""

    op_prior: OpPrior = OpPrior()
    """First logits of the operations, besides what is advised."""

    probability_floor: PerHead = PerHead.fill(0.0)
    """The least probability, per head, that each of n legal choices keeps for ever; 1 / n where that is less. Below
    .5; 0 is none. The policy's distributions are mixed with uniform ones for it, in acting and in all that is learned;
    played greedily, a policy takes what is likeliest without it. One number for all heads, or some of them by name."""

    def promise_seen(self, measured: PromiseSettings | None) -> PromiseSettings | None:
        """How what is promised is measured for the policy: as who advises it wishes, or else as ``measured``."""
        return measured if self.advice is None else self.advice.rule.promise

    @field_validator("probability_floor")
    @classmethod
    def _something_is_left_to_choose(cls, floor: PerHead) -> PerHead:
        for head, number in zip(Head, floor.by_head, strict=True):
            if number >= 0.5:
                raise ValueError(f"{number} for {head.name.lower()} leaves nothing to choose: set it below 0.5")
        return floor

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.attention_heads:
            raise ValueError(f"width {self.width} is not a multiple of attention_heads {self.attention_heads}")
        return self
