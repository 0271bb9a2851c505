"""Instances, the learning problems of a suite, and their labelled data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import TaskError
from esper.numerics.arrays import Float32s, Ints

Part = Literal["train", "validation", "test"]
"""The host trains on ``train``, the controller decides by ``validation``, and ``test`` is for evaluation only."""

PARTS: tuple[Part, ...] = ("train", "validation", "test")


class LabelledArrays(NamedTuple):
    """N raw examples ``[N, ...]`` and their labels ``[N]`` or ``[N, T]``."""

    inputs: Float32s
    labels: Ints


@dataclass(frozen=True)
class Data:
    """N labelled examples as tensors: inputs float32 ``[N, ...]``, labels int64 ``[N]``.

    Labels are ``[N, T]`` where a host predicts at every position of an example, as language models do.
    """

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
        """The scale of inputs of any shape."""
        return cls(float(inputs.mean()), float(inputs.std()))

    def apply(self, inputs: Float32s) -> Float32s:
        """Standardise inputs: a new array of the same shape."""
        return (inputs - np.float32(self.mean)) / np.float32(self.deviation)


def standardise(inputs: Float32s, labels: Ints, scale: Scale) -> Data:
    """Standardised inputs ``[N, ...]`` and labels, without shared memory."""
    return Data(torch.from_numpy(scale.apply(inputs)), torch.from_numpy(labels.copy()))


def add_label_noise(labels: Ints, fraction: float, classes: int, rng: np.random.Generator) -> Ints:
    """Redraw each label uniformly with probability ``fraction``; it may stay the same."""
    # The random stream does not depend on the fraction.
    redrawn = rng.random(labels.shape) < fraction
    return np.where(redrawn, rng.integers(classes, size=labels.shape), labels)


@dataclass(frozen=True)
class Instance:
    """The settings of one learning problem; equal instances give equal hosts and equal data, in any process."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    suite: str
    family: str
    variant: str
    """The hidden setting within the family; no controller observes it."""
    seed: int
    """Random seed of the host's initial weights and of every part of the data."""
    widths: tuple[int, ...]
    """Number of channels at each site of the host."""
    learning_rate: float
    train_size: int
    """Number of training examples."""
    rent: float
    """Price of growth: ``J = score - rent * log1p(added parameters / host parameters)``."""
    label_noise: float = 0.0
    """Fraction of the training labels that are redrawn uniformly; validation and test labels are always clean."""
    drift_step: int | None = None
    """Decision step at which the data change to phase 1; None: the data never change."""
    linear: bool = False
    """Whether the host's activation is the identity instead of ReLU."""

    @property
    def name(self) -> str:
        """``family/variant/seed``, unique among the draws of a suite."""
        return f"{self.family}/{self.variant}/{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """The instance as plain JSON values; the inverse of `from_json`."""
        return {**asdict(self), "widths": list(self.widths)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Instance:
        """The instance of a record from `to_json`; raises TaskError that names the first invalid field."""
        try:
            return _RECORDS.validate_python(dict(record))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise TaskError(f"not the record of an instance: field '{field}': {first['msg']}") from error


_RECORDS = TypeAdapter(Instance)
