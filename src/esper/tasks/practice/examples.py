"""Training, validation and test parts of a task's data, on one device, without a loader between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.errors import TaskError
from esper.numerics.arrays import Ints
from esper.numerics.random_streams import child_generator
from esper.tasks.data import Scale

Tokens = NDArray[np.unsignedinteger[Any]]
"""Indices into a vocabulary."""


class Minibatch(NamedTuple):
    """What a host reads, and the classes it is to find."""

    inputs: Tensor
    """``[B, ...]``."""
    targets: Tensor
    """int64 ``[B]``, or ``[B, T]`` for every position of a sequence."""


class Examples(Protocol):
    """One part of a task's data."""

    def __len__(self) -> int:
        """Examples in one epoch."""
        ...

    def epoch(self, size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """Minibatches of exactly ``size`` examples in random order; one of all examples if there are fewer."""
        ...

    def in_order(self, size: int) -> Iterator[Minibatch]:
        """All examples once, always the same, at most ``size`` at a time."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same examples, whose batches are on ``device``."""
        ...


class Splits(NamedTuple):
    """Disjoint parts of one data set, the same in every run."""

    train: Examples
    """What hosts learn from."""
    validation: Examples
    """What controllers are told about."""
    test: Examples
    """Read once, at the end."""
    classes: int
    """How many a host has to choose from."""

    def to(self, device: torch.device) -> Splits:
        """The same, on ``device``."""
        return Splits(self.train.to(device), self.validation.to(device), self.test.to(device), self.classes)


@dataclass(frozen=True)
class Labelled:
    """N examples of one label each: inputs of any type ``[N, ...]``, which batches hold as float32, standardised."""

    inputs: Tensor
    labels: Tensor
    """int64 ``[N]``."""
    scale: Scale

    def __len__(self) -> int:
        return len(self.labels)

    def epoch(self, size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """A random permutation; what does not fill the last minibatch is left out."""
        order = torch.from_numpy(rng.permutation(len(self))).to(self.labels.device)
        for begin in _starts(len(self), size):
            yield self._batch(order[begin : begin + size])

    def in_order(self, size: int) -> Iterator[Minibatch]:
        """From the first to the last."""
        for begin in range(0, len(self), size):
            yield self._batch(slice(begin, begin + size))

    def to(self, device: torch.device) -> Labelled:
        """All of them at once."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))

    def _batch(self, chosen: Tensor | slice) -> Minibatch:
        inputs = self.inputs[chosen].to(torch.float32)
        return Minibatch((inputs - self.scale.mean) / self.scale.deviation, self.labels[chosen])


@dataclass(frozen=True)
class Windows:
    """Stretches of a text: at each of ``length`` positions the next token is to be found.

    Raises:
        TaskError: the text is too short for a single window.
    """

    tokens: Tokens
    """``[N]``."""
    length: int
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise TaskError(
                f"a part of the text has {len(self.tokens)} characters, which is less than a window of "
                f"{self.length} and what follows it: give a longer text"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def epoch(self, size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """Windows that begin anywhere, as many as would cover the text once."""
        starts = rng.integers(len(self.tokens) - self.length, size=len(self))
        for begin in _starts(len(self), size):
            yield self._batch(starts[begin : begin + size])

    def in_order(self, size: int) -> Iterator[Minibatch]:
        """One window after the other, without overlap; what does not fill the last one is left out."""
        starts = np.arange(len(self)) * self.length
        for begin in range(0, len(self), size):
            yield self._batch(starts[begin : begin + size])

    def to(self, device: torch.device) -> Windows:
        """The text stays where it is; each batch is moved."""
        return replace(self, device=device)

    def _batch(self, starts: Ints) -> Minibatch:
        places = starts[:, None] + np.arange(self.length + 1)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64)).to(self.device)
        return Minibatch(windows[:, :-1], windows[:, 1:])


def _starts(count: int, size: int) -> range:
    """Where minibatches of ``size`` begin, the last one whole unless it is the only one."""
    return range(0, max(count - size, 0) + 1, size)


SPLIT_SEED = 0
"""The split belongs to the task: every run has the same."""
MEASURED = 10_000
"""Training examples that mean and deviation are taken from."""

Inputs = NDArray[Any]
"""``[N, ...]``, of any number type."""


def split_examples(pool: tuple[Inputs, Ints], test: tuple[Inputs, Ints], validation: int, classes: int) -> Splits:
    """``validation`` random examples of ``pool`` are for the controller, the others for training."""
    inputs, labels = pool
    order = child_generator(SPLIT_SEED).permutation(len(labels))
    held, learned = np.sort(order[:validation]), np.sort(order[validation:])
    scale = Scale.of(inputs[learned[:MEASURED]].astype(np.float32))
    return Splits(
        _label(inputs[learned], labels[learned], scale),
        _label(inputs[held], labels[held], scale),
        _label(*test, scale),
        classes,
    )


def _label(inputs: Inputs, labels: Ints, scale: Scale) -> Labelled:
    return Labelled(torch.from_numpy(inputs.copy()), torch.from_numpy(labels.astype(np.int64)), scale)
