"""Models that reproduce what they read: an autoencoder, a variational one, and a field of one photograph."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign_models.problem import Examples, Problem, Recipe, Splits, floats, split
from foreign_models.sources import read_photographs, split_digits


def split_images(seed: int) -> Splits:
    """Digits as vectors ``[N, 64]``, which are what is to be returned, too."""

    def pair(examples: Examples) -> Examples:
        flat = examples.inputs[0].flatten(1)
        return Examples((flat,), flat)

    return Splits(*map(pair, split_digits(seed)))


class Autoencoder(nn.Module):
    """Vectors ``[B, 64]`` through six numbers and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class VariationalAutoencoder(nn.Module):
    """Vectors ``[B, 64]`` from 0 to 1 to logits ``[B, 64]``, and mean and log-variance ``[B, 5]`` of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(32, 5), nn.Linear(32, 5)
        self.decoder = nn.Sequential(nn.Linear(5, 32), nn.ReLU())
        self.out = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.out(self.decoder(mean + noise * (0.5 * log_variance).exp())), mean, log_variance


def negative_elbo(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Nats for each example: cross-entropy of the pixels and divergence of the code from a standard normal."""
    logits, mean, log_variance = outputs
    pixels = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1)
    return (pixels + divergence).mean()


class SineLayer(nn.Module):
    """A linear layer under a sine, with the first weights of Sitzmann et al. (2020, arXiv:2006.09661)."""

    def __init__(self, inputs: int, outputs: int, frequency: float, *, first: bool = False) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(inputs, outputs), frequency
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / frequency
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


def make_siren() -> nn.Sequential:
    """Coordinates ``[B, 2]`` to brightness ``[B, 1]``."""
    return nn.Sequential(SineLayer(2, 24, 15.0, first=True), SineLayer(24, 24, 15.0), nn.Linear(24, 1))


def split_pixels(seed: int) -> Splits:
    """Every other pixel of a photograph's part, in both directions, with brightness from -1 to 1."""
    part = read_photographs()[0, 100:260:2, 200:360:2]
    axes = (np.linspace(-1, 1, side) for side in part.shape)
    coordinates = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    return split(floats(coordinates), floats(2 * part.reshape(-1, 1) - 1), seed, 800, 1600)


PROBLEMS = (
    Problem(
        name="autoencoder",
        build=Autoencoder,
        data=split_images,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=40, batch_size=50, learning_rate=2e-3),
        slots={"encoder.1": ["mlp", "lowrank"], "encoder.2": ["mlp", "lowrank"], "decoder.1": ["mlp", "lowrank"]},
    ),
    Problem(
        name="vae",
        build=VariationalAutoencoder,
        data=split_images,
        task="loss",
        loss=negative_elbo,
        recipe=Recipe(epochs=40, batch_size=50, learning_rate=2e-3),
        slots={"encoder": ["mlp", "lowrank"], "decoder": ["mlp", "lowrank"]},
    ),
    Problem(
        name="siren",
        build=make_siren,
        data=split_pixels,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=40, batch_size=200, learning_rate=1e-3),
        slots={"0": ["mlp", "lowrank"], "1": ["mlp", "lowrank"]},
    ),
)
