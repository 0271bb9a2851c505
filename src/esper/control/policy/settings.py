"""How large the learned controller is and how it starts."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from esper.settings import Settings


class PolicySettings(Settings):
    """Sizes and initialisation of the recurrent policy. None of them depends on the number of slots or blueprints."""

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

    op_prior: tuple[float, float, float, float, float, float] = (1.5, 0.0, 0.0, 0.0, 1.0, -2.0)
    """First logits of wait, germinate, advance, set_alpha, fossilize and prune: the untrained policy gives what it
    germinates time to show its worth, where a uniform one would prune nearly everything at once."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.attention_heads:
            raise ValueError(f"width {self.width} is not a multiple of attention_heads {self.attention_heads}")
        return self
