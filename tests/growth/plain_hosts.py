"""Hosts that know torch alone, so that a process without Esper can unpickle them."""

import math

from torch import Tensor, nn


class Passing(nn.Module):
    """From inputs of one shape to features of another, which pass through ``place``."""

    def __init__(self, input_shape: tuple[int, ...], shape: tuple[int, ...], place: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.first = nn.Linear(math.prod(input_shape), math.prod(shape))
        self.place = place

    def forward(self, inputs: Tensor) -> Tensor:
        return self.place(self.first(inputs.flatten(1)).reshape(-1, *self.shape))


class Convolutional(nn.Module):
    """A small image classifier with batch normalisation and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.stem(images)).relu()
        features = features + self.block(features)
        return self.head(features.mean((2, 3)))


class Tokenwise(nn.Module):
    """Tokens of any number, each by itself."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, *, scale: Tensor | None = None) -> Tensor:
        hidden = self.first(tokens).tanh()
        return self.head(hidden if scale is None else hidden * scale)


def classifier() -> nn.Sequential:
    """Of vectors; a container that runs its children in order."""
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
