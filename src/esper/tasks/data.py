"""Labelled examples, and the parts they are split into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from esper.numerics.arrays import Float32s, Ints

Part = Literal["train", "validation", "test"]
"""train feeds the host's optimizer, validation the controller, test only evaluation."""

PARTS: tuple[Part, ...] = ("train", "validation", "test")


class LabelledArrays(NamedTuple):
    """N raw examples ``[N, ...]`` and their labels ``[N]``."""

    inputs: Float32s
    labels: Ints


@dataclass(frozen=True)
class Data:
    """N labelled examples as tensors: inputs float32 ``[N, ...]``, labels int64 ``[N]``."""

    inputs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]


@dataclass(frozen=True)
class Scale:
    """Global standardisation: one mean and one standard deviation for all features."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, inputs: Float32s) -> Scale:
        """The scale of the given inputs, any shape."""
        return cls(float(inputs.mean()), float(inputs.std()))

    def apply(self, inputs: Float32s) -> Float32s:
        """Inputs with the mean subtracted, in units of the deviation; a new array of the same shape."""
        return (inputs - np.float32(self.mean)) / np.float32(self.deviation)


def standardise(inputs: Float32s, labels: Ints, scale: Scale) -> Data:
    """Standardised arrays ``[N, ...]`` and labels ``[N]`` as Data that shares no memory with them."""
    return Data(torch.from_numpy(scale.apply(inputs)), torch.from_numpy(labels.copy()))


def add_label_noise(labels: Ints, fraction: float, classes: int, rng: np.random.Generator) -> Ints:
    """Labels ``[N]`` of which each is redrawn uniformly (and so may stay) with probability ``fraction``."""
    redrawn = rng.random(labels.shape) < fraction
    return np.where(redrawn, rng.integers(classes, size=labels.shape), labels)
