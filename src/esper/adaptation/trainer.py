"""Growing one structure on a frozen host, and measuring what it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.config.arguments import describe_value, read_number
from esper.errors import ConfigError, DivergedError
from esper.growth.model import GrowingModel
from esper.numerics.random_streams import Stream, module_generator, torch_generator

Structure = Mapping[str, str]
"""Blueprints by the names of the slots where they grow."""
Loss = Callable[[GrowingModel, Any], Tensor]
Measure = Callable[[GrowingModel, Any], Any]
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

WARMUP = 1 / 6
"""Share of the steps in which the weight of what grows rises from zero, evenly."""
SHARES = tuple(tenths / 10 for tenths in range(10, -1, -1))
"""Of what was learned, to choose from where other data must not be forgotten."""


class Figures(NamedTuple):
    """How a model does on some data: means over examples."""

    score: float
    """The higher, the better; -inf where training diverged."""
    loss: float
    """inf where training diverged."""
    examples: int
    """So many there were, batch by batch in the last call of the model."""

    @property
    def rank(self) -> tuple[float, float]:
        """Greater for the better; of equal scores the lower loss."""
        return self.score, -self.loss

    @classmethod
    def merge(cls, parts: Sequence[Figures]) -> Figures:
        """Figures of the data of all parts together."""
        count = sum(part.examples for part in parts)
        score = sum(part.score * part.examples for part in parts) / count
        return cls(score, sum(part.loss * part.examples for part in parts) / count, count)


class Retention(NamedTuple):
    """What other data allow."""

    share: float
    """Of what was learned: the weight of what grew, in [0, 1]."""
    rise: float
    """Of the loss on the other data, as a share of what it was."""


@dataclass(frozen=True)
class Recipe:
    """How anything that grows is trained and measured."""

    loss: Loss
    score: Measure | None
    optimizer: MakeOptimizer
    epochs: int
    source: Sequence[Any]
    """Batches of the data that must not be forgotten: every second one is learned, the others are to tell whether."""
    tolerance: float
    seed: int


class Trainer:
    """Trains structures on a model, one at a time, each from its beginning.

    Args:
        model: With a frozen host and free slots.
        recipe: How.

    Raises:
        ConfigError: the loss on the source data is not above zero, or is none.
    """

    def __init__(self, model: GrowingModel, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self._replayed, self._watched = recipe.source[0::2], recipe.source[1::2]
        self.source_loss = math.nan
        """Of the host by itself, on the source data that nothing learns from; not a number where there are none."""
        if recipe.source:
            self.source_loss = self.measure_host(self._watched).loss
            if not self.source_loss > 0:
                raise ConfigError(
                    f"source: the loss there is {self.source_loss:g}: a share of it can be told of losses above 0 alone"
                )

    def fit(self, structure: Structure, batches: Sequence[Any], *key: int) -> Retention:
        """Grow ``structure`` from nothing on ``batches``, in an order that follows from ``key``.

        Where there are other data, a batch of them goes with every one of ``batches``, and the losses are added.
        Afterwards what grew is given as much weight as they allow.

        Raises:
            ConfigError: the loss or the optimizer is none.
            DivergedError: the loss is not finite any more.
        """
        model, recipe = self.model, self.recipe
        model.swap(None)
        places = {name: at for at, name in enumerate(model.slots)}
        for name, blueprint in structure.items():
            model.slots[name].germinate(blueprint, module_generator(recipe.seed, places[name], 0))
        optimizer = self._make_optimizer()
        order = torch_generator(recipe.seed, *key, Stream.DATA_ORDER)
        steps = recipe.epochs * len(batches)
        model.train()
        with repeatable(recipe.seed):
            for step, batch in enumerate(_shuffle(batches, recipe.epochs, order)):
                self._weigh(min(1.0, (step + 1) / (WARMUP * steps)))
                optimizer.zero_grad()
                loss = self._compute_loss(batch)
                if recipe.source:
                    chosen = int(torch.randint(len(self._replayed), (), generator=order))
                    loss = loss + self._compute_loss(self._replayed[chosen])
                if not loss.requires_grad:
                    raise ConfigError(
                        "loss(model, batch) does not depend on what grows: return what model gives rise to"
                    )
                loss.backward()
                optimizer.step()
        model.eval()
        return self._retain()

    def measure_host(self, batches: Sequence[Any]) -> Figures:
        """As `measure`, before anything grows.

        Raises:
            ConfigError: the loss or the score is none, or not finite.
        """
        try:
            return self.measure(batches)
        except DivergedError as error:
            raise ConfigError(
                f"{error} for the host as it is: is a batch empty, or does it hold what is no number?"
            ) from error

    @torch.no_grad()
    def measure(self, batches: Sequence[Any]) -> Figures:
        """The model as it is now, in evaluation mode, on ``batches``; if nobody gave a score, that is minus the loss.

        Where loss or score are random, as those of diffusion models, random numbers are the same in every call.

        Raises:
            ConfigError: the loss or the score is none, or there is no example.
            DivergedError: the loss is not finite.
        """
        model, score = self.model.eval(), self.recipe.score
        losses, scores, count = 0.0, 0.0, 0
        with repeatable(self.recipe.seed):
            for batch in batches:
                loss = float(self._compute_loss(batch))
                examples = len(model.tap.inputs)
                losses += examples * loss
                scores += examples * (-loss if score is None else _read_score(score(model, batch)))
                count += examples
        if not count:
            raise ConfigError("the batches hold no example: give some, and no batches that are empty")
        return Figures(scores / count, losses / count, count)

    def measure_without(self, slot: str, batches: Sequence[Any]) -> Figures:
        """As `measure`, with what grew in ``slot`` switched off."""
        with self.model.slots[slot].disabled():
            return self.measure(batches)

    def _retain(self) -> Retention:
        """Give what grew the greatest weight at which the other data's loss has not risen too much."""
        if not self.recipe.source:
            return Retention(1.0, 0.0)
        for share in SHARES:
            self._weigh(share)
            rise = self.measure(self._watched).loss / self.source_loss - 1
            if rise <= self.recipe.tolerance:
                return Retention(share, rise)
        return Retention(0.0, 0.0)

    def _weigh(self, alpha: float) -> None:
        for name in self.model.seeds:
            self.model.slots[name].set_alpha(alpha)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        groups = self.model.parameter_groups()
        optimizer = self.recipe.optimizer(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"optimizer(groups) returned {describe_value(optimizer)}: it must return a torch optimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("optimizer(groups) returned LBFGS, which asks for a closure: take one that does not")
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if not all(id(one) in trained for seed in self.model.seeds.values() for one in seed.parameters()):
            raise ConfigError(
                "optimizer(groups) returned an optimizer of other parameters: make it of the groups given"
            )
        return optimizer

    def _compute_loss(self, batch: Any) -> Tensor:
        self.model.tap.clear()
        loss = self.recipe.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"loss(model, batch) returned {describe_value(loss)}: it must return a tensor with one real number"
            )
        if not self.model.tap.called:
            raise ConfigError("loss(model, batch) does not call the model as a whole: compute the loss from model(...)")
        if not torch.isfinite(loss):
            raise DivergedError(f"loss(model, batch) is {float(loss.detach()):g}")
        return loss


def _shuffle(batches: Sequence[Any], epochs: int, generator: torch.Generator) -> Iterator[Any]:
    for _ in range(epochs):
        for at in torch.randperm(len(batches), generator=generator):
            yield batches[int(at)]


@contextmanager
def repeatable(seed: int) -> Generator[None]:
    """Within the block torch's global random numbers, which dropout takes, follow from ``seed``; others find theirs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _read_score(value: Any) -> float:
    try:
        read = read_number(value)
    except ValueError:
        read = math.nan
    if not math.isfinite(read):
        raise ConfigError(f"score(model, batch) returned {describe_value(value)}: it must return a finite number")
    return read
