"""What a foreign model consists of: a plain module, its data, its recipe, and the places that its owner would name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Task = Literal["classification", "language_modelling", "multi_label", "regression", "loss"]
"""How a model is judged: as `esper.Validation` does it, or by the mean of its own training loss."""
EVALUATION_BATCH = 256
"""Examples in one forward pass without gradients."""


@dataclass(frozen=True)
class Examples:
    """N examples: the arguments of the model, ``[N, ...]`` each, and what it is to return."""

    inputs: tuple[Tensor, ...]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def select(self, chosen: Tensor | slice) -> Examples:
        """Some of the examples."""
        return Examples(tuple(part[chosen] for part in self.inputs), self.targets[chosen])

    def shuffle(self, size: int, generator: torch.Generator) -> Iterator[Examples]:
        """Minibatches of exactly ``size`` examples in random order; what does not fill the last one is left out."""
        order = torch.randperm(len(self), generator=generator)
        for begin in range(0, len(self) - size + 1, size):
            yield self.select(order[begin : begin + size])

    def in_order(self) -> list[tuple[tuple[Tensor, ...], Tensor]]:
        """All examples once, as batches for `esper.Validation`."""
        parts = [self.select(slice(begin, begin + EVALUATION_BATCH)) for begin in range(0, len(self), EVALUATION_BATCH)]
        return [(part.inputs, part.targets) for part in parts]


class Splits(NamedTuple):
    """Disjoint parts of one data set."""

    train: Examples
    validation: Examples
    """What growth is decided by."""
    test: Examples
    """Read once, at the end."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, by its owner's guess."""

    epochs: int
    """Also the number of decisions: one after each epoch."""
    batch_size: int
    learning_rate: float
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """``sgd`` has a momentum of .9."""
    weight_decay: float = 0.0
    cosine: bool = False
    """Whether the rate falls to zero along half a cosine, epoch by epoch."""
    clip_norm: float | None = None

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer for parameters or groups of them."""
        kinds = {
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
            "sgd": partial(torch.optim.SGD, momentum=0.9),
        }
        return kinds[self.optimizer](parameters, lr=self.learning_rate, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Problem:
    """A model of somebody who trains it without growth."""

    name: str
    build: Callable[[], nn.Module]
    """The model with fresh weights, from torch's global generator as usual."""
    data: Callable[[int], Splits]
    """The data for a random seed: the same task for all of them, other examples or another split."""
    task: Task
    loss: Callable[[Any, Tensor], Tensor]
    """Mean training loss, from what the model returns and the targets."""
    recipe: Recipe
    slots: Mapping[str, Sequence[str] | str]
    """What its owner would give to `esper.attach`."""


def split(inputs: Tensor | tuple[Tensor, ...], targets: Tensor, seed: int, validation: int, test: int) -> Splits:
    """Random examples for validation and test, all others for training."""
    examples = Examples(inputs if isinstance(inputs, tuple) else (inputs,), targets)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    parts = order[validation + test :], order[:validation], order[validation : validation + test]
    return Splits(*(examples.select(part) for part in parts))


def standardise(splits: Splits, *, targets: bool = False) -> Splits:
    """Mean 0 and deviation 1 in training, for each column of the first input, or of the targets."""

    def read(examples: Examples) -> Tensor:
        return examples.targets if targets else examples.inputs[0]

    mean, deviation = read(splits.train).mean(0), read(splits.train).std(0).clamp_min(1e-6)

    def scale(examples: Examples) -> Examples:
        scaled = (read(examples) - mean) / deviation
        if targets:
            return Examples(examples.inputs, scaled)
        return Examples((scaled, *examples.inputs[1:]), examples.targets)

    return Splits(*map(scale, splits))


def floats(values: Any) -> Tensor:
    """Numbers as float32."""
    return torch.from_numpy(np.asarray(values, np.float32))


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions: logits ``[B, T, vocabulary]``, targets ``[B, T]``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
