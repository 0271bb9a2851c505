"""Small hosts of the usual kinds: plain modules that know nothing of growth, and how each is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EMBEDDING_DEVIATION = 0.02
"""As in GPT-2 (Radford et al., 2019)."""

Host = TypeVar("Host", bound=nn.Module)


def build_host(make: Callable[[], Host], generator: torch.Generator) -> Host:
    """What ``make`` makes of linear, convolution, embedding and normalisation layers, with fresh weights.

    Weights are He-uniform (He et al., 2015, arXiv:1502.01852), embeddings normal, biases zero.

    Raises:
        TypeError: it has parameters of another kind.
    """
    with torch.device("meta"):
        host = make()
    host.to_empty(device=generator.device)
    for module in host.modules():
        _initialise(module, generator)
    return host


@torch.no_grad()
def _initialise(module: nn.Module, generator: torch.Generator) -> None:
    match module:
        case nn.Linear() | nn.Conv1d() | nn.Conv2d():
            bound = math.sqrt(6 / module.weight[0].numel())
            module.weight.uniform_(-bound, bound, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        case nn.Embedding():
            module.weight.normal_(std=EMBEDDING_DEVIATION, generator=generator)
        case nn.LayerNorm() | nn.BatchNorm1d() | nn.BatchNorm2d():
            module.reset_parameters()
        case _:
            if any(True for _ in module.parameters(recurse=False)):
                raise TypeError(f"no rule for the first weights of {type(module).__name__}")


class MlpNet(nn.Module):
    """Inputs ``[B, ...]``, flattened, through two ReLU layers to logits ``[B, classes]``."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.head(self.layer2(self.layer1(inputs.flatten(1))))


class Conv1dNet(nn.Module):
    """Signals ``[B, C, L]`` through three ReLU convolutions, the first two halving L, to logits ``[B, classes]``."""

    def __init__(self, channels: int, widths: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        first, second, third = widths
        self.layer1 = nn.Sequential(nn.Conv1d(channels, first, 5, stride=2, padding=2), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv1d(first, second, 3, stride=2, padding=1), nn.ReLU())
        self.layer3 = nn.Sequential(nn.Conv1d(second, third, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(third, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.head(self.layer3(self.layer2(self.layer1(inputs))).mean(-1))


class ConvNet(nn.Module):
    """Images ``[B, C, H, W]`` through two ReLU convolutions, each halving H and W, to logits ``[B, classes]``."""

    def __init__(self, channels: int, widths: tuple[int, int], classes: int) -> None:
        super().__init__()
        first, second = widths
        self.layer1 = nn.Sequential(nn.Conv2d(channels, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(second, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.head(self.layer2(self.layer1(inputs)).mean((2, 3)))


class Block(nn.Module):
    """Two normalised 3 x 3 convolutions and a skip; features ``[B, inputs, H, W]`` to ``[B, outputs, ...]``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Features of the block's width."""
        inner = self.norm1(self.conv1(features)).relu()
        return (self.norm2(self.conv2(inner)) + self.skip(features)).relu()


class ResNet(nn.Module):
    """Images ``[B, C, H, W]`` through three blocks, the later ones halving H and W, to logits ``[B, classes]``."""

    def __init__(self, channels: int, widths: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        first, second, third = widths
        self.stem = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()
        )
        self.layer1 = Block(first, first, 1)
        self.layer2 = Block(first, second, 2)
        self.layer3 = Block(second, third, 2)
        self.head = nn.Linear(third, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        features = self.layer3(self.layer2(self.layer1(self.stem(inputs))))
        return self.head(features.mean((2, 3)))


class SelfAttention(nn.Module):
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
        self.attention = SelfAttention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, T, D]`` of the same shape."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


PATCHES = 4
"""Patches along the shorter side of an image, at most."""


class ViT(nn.Module):
    """Images ``[B, C, H, W]`` as patches through two blocks; the mean over patches to logits ``[B, classes]``."""

    def __init__(self, shape: tuple[int, ...], width: int, heads: int, classes: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        side = -(-min(height, breadth) // PATCHES)
        count = (height // side) * (breadth // side)
        self.patches = nn.Conv2d(channels, width, side, stride=side)
        self.places = nn.Embedding(count, width)
        self.block1 = TransformerBlock(width, heads)
        self.block2 = TransformerBlock(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.places.weight  # [B, T, D]
        return self.head(self.norm(self.block2(self.block1(tokens))).mean(1))


class Gpt(nn.Module):
    """Indices int64 ``[B, T]``, T at most ``length``, through two causal blocks to logits ``[B, T, classes]``."""

    def __init__(self, length: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(classes, width)
        self.places = nn.Embedding(length, width)
        self.block1 = TransformerBlock(width, heads, causal=True)
        self.block2 = TransformerBlock(width, heads, causal=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, indices: Tensor) -> Tensor:
        """Logits ``[B, T, classes]`` of the next index at each position."""
        tokens = self.characters(indices) + self.places.weight[: indices.shape[1]]
        return self.head(self.norm(self.block2(self.block1(tokens))))


@dataclass(frozen=True)
class HostKind:
    """A kind of host: what it is made of, where it may grow, and how it is trained by AdamW."""

    make: Callable[[tuple[int, ...], int], nn.Module]
    """From the shape of one input and the number of classes."""
    sites: tuple[str, ...]
    """Modules whose outputs may grow."""
    blueprints: tuple[str, ...]
    """On offer at every site."""
    learning_rate: float
    """Constant."""
    weight_decay: float
    batch_size: int
    epochs: int
    """Each ends with a decision."""

    @property
    def slots(self) -> dict[str, tuple[str, ...]]:
        """The blueprints on offer, by site."""
        return dict.fromkeys(self.sites, self.blueprints)

    def build(self, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> nn.Module:
        """A host for inputs of that shape, its first weights drawn from ``generator``."""
        return build_host(lambda: self.make(shape, classes), generator)


RESNET_WIDTHS = (8, 16, 32)

HOSTS: Mapping[str, HostKind] = {
    "mlp": HostKind(
        lambda shape, classes: MlpNet(math.prod(shape), 32, classes),
        sites=("layer1", "layer2"),
        blueprints=("lowrank", "mlp", "mlp_wide"),
        learning_rate=3e-3,
        weight_decay=0.01,
        batch_size=64,
        epochs=40,
    ),
    "conv": HostKind(
        lambda shape, classes: ConvNet(shape[0], (8, 16), classes),
        sites=("layer1", "layer2"),
        blueprints=("depthwise", "conv3x3"),
        learning_rate=3e-3,
        weight_decay=0.01,
        batch_size=64,
        epochs=30,
    ),
    "resnet": HostKind(
        lambda shape, classes: ResNet(shape[0], RESNET_WIDTHS, classes),
        sites=("layer1", "layer2", "layer3"),
        blueprints=("depthwise", "conv3x3"),
        learning_rate=3e-3,
        weight_decay=0.05,
        batch_size=128,
        epochs=20,
    ),
    "vit": HostKind(
        lambda shape, classes: ViT(shape, 24, 4, classes),
        sites=("block1", "block2"),
        blueprints=("mlp", "attention", "token_conv"),
        learning_rate=2e-3,
        weight_decay=0.05,
        batch_size=64,
        epochs=40,
    ),
    "conv1d": HostKind(
        lambda shape, classes: Conv1dNet(shape[0], (8, 8, 8), classes),
        sites=("layer1", "layer2", "layer3"),
        blueprints=("depthwise", "conv3x3"),
        learning_rate=5e-3,
        weight_decay=0.01,
        batch_size=64,
        epochs=40,
    ),
    "gpt": HostKind(
        lambda shape, classes: Gpt(shape[0], 32, 4, classes),
        sites=("block1", "block2"),
        blueprints=("mlp", "attention"),
        learning_rate=3e-3,
        weight_decay=0.05,
        batch_size=64,
        epochs=15,
    ),
}
"""The kinds of hosts by name."""
