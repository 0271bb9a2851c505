"""The block that the transformers share (Vaswani et al., 2017, arXiv:1706.03762; pre-norm: arXiv:2002.04745)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention on tokens ``[B, T, D]``; ``causal``: none sees a later one."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of the same shape."""
        split = self.inner(tokens).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, heads, D / heads]
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.outer(mixed.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """Attention and a GELU layer of twice the width, each behind a normalisation and beside a skip."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, T, D]`` of the same shape."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))
