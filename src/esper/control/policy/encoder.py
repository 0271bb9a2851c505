"""From an observation to slot tokens and one summary of the whole network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.policy.layers import RELU_GAIN, linear
from esper.control.policy.settings import PolicySettings
from esper.control.spaces import Observation, ObservationSpec


class SlotAttention(nn.Module):
    """One pre-norm residual layer of self-attention across slots; without positions, so slots may be permuted."""

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = linear(width, 3 * width, generator)
        self.merge = linear(width, width, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[N, S, W]`` to the same."""
        rows, slots, width = tokens.shape
        projected = self.project(self.norm(tokens)).view(rows, slots, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each [N, heads, S, W / heads]
        attended = F.scaled_dot_product_attention(query, key, value)
        return tokens + self.merge(attended.transpose(1, 2).reshape(rows, slots, width))


class Encoder(nn.Module):
    """The same encoder for each slot, attention across slots, and a summary that ignores their order and number."""

    def __init__(self, spec: ObservationSpec, settings: PolicySettings, generator: torch.Generator) -> None:
        super().__init__()
        width = settings.width
        self.slot = linear(spec.slots, width, generator, RELU_GAIN)
        self.attention = SlotAttention(width, settings.attention_heads, generator)
        self.network = linear(spec.globals, width, generator, RELU_GAIN)
        self.summary_width = 3 * width

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Normalised features of N rows to tokens ``[N, S, W]`` and summary ``[N, 3 W]``."""
        tokens = self.attention(F.relu(self.slot(observation.slots)))
        network = F.relu(self.network(observation.globals))
        return tokens, torch.cat((network, tokens.mean(1), tokens.amax(1)), -1)
