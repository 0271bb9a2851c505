"""A sum over the examples of a batch is not taken for their mean, which means over several batches are made of."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.errors import LookError
from esper.growth.batch_means import Reduction, find_reduction
from esper.growth.model import GrowingModel

WIDTH, CLASSES = 4, 3
SIZES = (6, 5, 2)

Pair = namedtuple("Pair", ["inputs", "labels"])


@dataclasses.dataclass
class Record:
    inputs: Tensor
    labels: Tensor


class Opaque:
    """A batch that only its own loss can read."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels


def draw(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


BATCHES: dict[str, tuple[Callable[[int], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "pairs": (draw, lambda batch: batch),
    "lists": (lambda size: list(draw(size)), lambda batch: (batch[0], batch[1])),
    "dictionaries": (lambda size: dict(zip("xy", draw(size), strict=True)), lambda batch: (batch["x"], batch["y"])),
    "a tokenizer's": (
        lambda size: UserDict(zip("xy", draw(size), strict=True)),
        lambda batch: (batch["x"], batch["y"]),
    ),
    "named tuples": (lambda size: Pair(*draw(size)), lambda batch: (batch.inputs, batch.labels)),
    "dataclasses": (lambda size: Record(*draw(size)), lambda batch: (batch.inputs, batch.labels)),
    "arrays": (lambda size: [part.numpy() for part in draw(size)], lambda batch: tuple(map(torch.from_numpy, batch))),
    "labels in a list": (
        lambda size: (draw(size)[0], draw(size)[1].tolist()),
        lambda batch: (batch[0], torch.tensor(batch[1])),
    ),
}
"""Kinds of batches, and how a loss reads them."""


def attach() -> GrowingModel:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    return esper.attach(host, {"0": ["mlp"]}, draw(2)[0], freeze_host=True)


def make_loss(read: Callable[[Any], tuple[Tensor, Tensor]], reduction: str) -> Callable[[Any, Any], Tensor]:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = read(batch)
        return F.cross_entropy(model(inputs), labels, reduction=reduction)

    return compute


@pytest.mark.parametrize("kind", BATCHES)
def test_a_look_refuses_a_sum_and_takes_a_mean(kind: str) -> None:
    make, read = BATCHES[kind]
    model, batches = attach(), [make(size) for size in SIZES]
    with pytest.raises(LookError, match="returned the sum of the examples' losses"):
        model.look(make_loss(read, "sum"), batches)
    mean, each = (model.look(make_loss(read, reduction), batches) for reduction in ("mean", "none"))
    assert mean.loss == pytest.approx(each.loss)
    assert mean.rows[0].promise == pytest.approx(each.rows[0].promise, abs=1e-5)


def test_a_batch_that_cannot_be_repeated_is_warned_of_if_sizes_differ() -> None:
    def compute(model: nn.Module, batch: Opaque) -> Tensor:
        return F.cross_entropy(model(batch.inputs), batch.labels)

    with pytest.warns(UserWarning, match="2 to 6 examples, and whether"):
        attach().look(compute, [Opaque(*draw(size)) for size in SIZES])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach().look(compute, [Opaque(*draw(size)) for size in (6, 6)])


def contrast(batch: Tensor) -> float:
    """InfoNCE: each example against all others, twice as large for twice the examples at one place."""
    return float(F.cross_entropy(3 * batch @ batch.mT, torch.arange(len(batch))))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda batch: float(batch.square().sum()), Reduction.SUM),
        (lambda batch: -float(batch.square().sum()), Reduction.SUM),
        (lambda batch: float(batch.square().mean()), Reduction.MEAN),
        (lambda batch: float(batch.square().mean()) * 7, Reduction.MEAN),
        (lambda batch: float(batch.square().sum()) + 100, Reduction.MEAN),
        (lambda batch: math.log(2) + math.log(len(batch) / 5), Reduction.MEAN),
        (contrast, Reduction.MEAN),
        (lambda _: 0.0, Reduction.UNKNOWN),
        (lambda batch: 1.0 if len(batch) == 5 else 1 / 0, Reduction.UNKNOWN),
    ],
)
def test_what_is_no_sum_is_not_taken_for_one(compute: Callable[[Tensor], float], expected: Reduction) -> None:
    torch.manual_seed(0)
    assert find_reduction(compute, torch.randn(5, WIDTH), 5) is expected


def test_random_numbers_of_a_loss_are_what_they_would_be_without_the_check() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch) - torch.randn(len(batch), CLASSES)).square().mean(1)

    batches = [draw(size)[0] for size in SIZES]
    each = attach().look(compute, batches, seed=0)
    torch.manual_seed(1)
    first = attach().look(lambda model, batch: compute(model, batch).mean(), batches)
    assert first.loss == pytest.approx(each.loss)
