"""Hosts of generated suites: five kinds, of any depth and width. Their blocks, ``block0`` and so on, are the sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.numerics.stacking import Stackable
from esper.tasks.generated.problems import Shape
from esper.tasks.layers import Conv1d, Linear, TokenLinear, initialise

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "none": nn.Identity,
}


@dataclass(frozen=True)
class Build:
    """What a host of a generated suite is made of."""

    kind: str
    shape: Shape
    widths: tuple[int, ...]
    """Channels of each block."""
    activation: str
    kernel: int
    """Of convolutions of signals."""


class Chain(nn.Module):
    """Blocks one after another, what they share of their positions, and a head."""

    def __init__(self, blocks: list[nn.Module], summarise: Callable[[Tensor], Tensor], head: nn.Module) -> None:
        super().__init__()
        self.depth = len(blocks)
        for index, block in enumerate(blocks):
            self.add_module(f"block{index}", block)
        self.summarise = summarise
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs ``[B, ...]`` to logits ``[B, classes]``."""
        for index in range(self.depth):
            inputs = self.get_submodule(f"block{index}")(inputs)
        return self.head(self.summarise(inputs))


def _all_of(features: Tensor) -> Tensor:
    return features


def _mean_of_tokens(features: Tensor) -> Tensor:
    return features.mean(-2)


def _mean_of_samples(features: Tensor) -> Tensor:
    return features.mean(-1)


def _mean_of_pixels(features: Tensor) -> Tensor:
    return features.mean((-2, -1))


def _last_token(features: Tensor) -> Tensor:
    return features[..., -1, :]


class StackableChain(Chain, Stackable):
    """One whose blocks, summary and head all work on the last axes."""


class Conv2d(nn.Conv2d):
    """A 3 x 3 convolution of images ``[B, C, H, W]``, padded by one pixel."""

    def __init__(self, inputs: int, outputs: int, stride: int, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, device="meta")
        initialise(self, generator)


class CausalBlock(Stackable):
    """A pre-norm transformer block with one head: tokens ``[..., B, T, C]`` to the same, none of which sees later ones.

    The first block of a host brings ``inputs`` features to C, with a learned vector for every position.
    """

    def __init__(self, inputs: int, width: int, positions: int, activation: str, generator: torch.Generator) -> None:
        super().__init__()
        self.embed = TokenLinear(inputs, width, generator) if inputs != width or positions else nn.Identity()
        self.position = nn.Parameter(torch.zeros(positions, width)) if positions else None
        self.project = TokenLinear(width, 3 * width, generator)
        self.merge = TokenLinear(width, width, generator)
        self.own = nn.Sequential(
            TokenLinear(width, 2 * width, generator),
            ACTIVATIONS[activation](),
            TokenLinear(2 * width, width, generator),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        tokens = self.embed(tokens)
        if self.position is not None:
            tokens = tokens + self.position.unsqueeze(-3)
        query, key, value = self.project(_normalise(tokens)).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        tokens = tokens + self.merge(F.softmax(scores.masked_fill(later, -torch.inf), -1) @ value)
        return tokens + self.own(_normalise(tokens))


def _normalise(tokens: Tensor) -> Tensor:
    """Each token with mean 0 and variance 1 over its channels; nothing is learned."""
    return F.layer_norm(tokens, tokens.shape[-1:])


def build(plan: Build, generator: torch.Generator) -> Chain:
    """The host, with first weights from ``generator``."""
    shape, activation = plan.shape, ACTIVATIONS[plan.activation]
    head = Linear(plan.widths[-1], shape.classes, generator)
    ins = (1 if plan.kind in ("signals", "images") else shape.channels, *plan.widths[:-1])
    pairs = list(zip(ins, plan.widths, strict=True))
    if plan.kind == "mlp":
        return StackableChain([nn.Sequential(Linear(*one, generator), activation()) for one in pairs], _all_of, head)
    if plan.kind == "tokens":
        blocks: list[nn.Module] = [nn.Sequential(TokenLinear(*one, generator), activation()) for one in pairs]
        return StackableChain(blocks, _mean_of_tokens, head)
    if plan.kind == "signals":
        blocks = [
            nn.Sequential(Conv1d(*one, plan.kernel, 2 if index < 2 else 1, generator), activation())
            for index, one in enumerate(pairs)
        ]
        return StackableChain(blocks, _mean_of_samples, head)
    if plan.kind == "images":
        blocks = [
            nn.Sequential(Conv2d(*one, 2 if index == 0 else 1, generator), activation())
            for index, one in enumerate(pairs)
        ]
        return Chain(blocks, _mean_of_pixels, head)
    blocks = [
        CausalBlock(*one, 0 if index else shape.positions, plan.activation, generator)
        for index, one in enumerate(pairs)
    ]
    return StackableChain(blocks, _last_token, head)
