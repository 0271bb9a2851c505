"""Growing one structure on a frozen host, and measuring what it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.config.arguments import describe_value, read_number
from esper.errors import ConfigError, DivergedError
from esper.growth.batch_means import Reduction, find_reduction
from esper.growth.model import GrowingModel
from esper.numerics.random_streams import Stream, module_generator, torch_generator

Structure = Mapping[str, str]
"""Blueprints by the names of the slots where they grow."""
Loss = Callable[[GrowingModel, Any], Tensor]
Measure = Callable[[GrowingModel, Any], Any]
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

WARMUP = 1 / 6
"""Share of the steps in which the weight of the grown modules rises from zero to one, linearly."""
WEIGHTS = tuple(tenths / 10 for tenths in range(10, -1, -1))
"""Weights of the grown modules to choose from where source data must not be forgotten."""


class Metrics(NamedTuple):
    """Score and loss of a model on some data: means over examples."""

    score: float
    """Higher is better; -inf where training diverged."""
    loss: float
    """inf where training diverged."""
    examples: int
    """Number of examples: batch sizes in the last call of the model, summed."""

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: greater is better; of equal scores the lower loss."""
        return self.score, -self.loss

    @classmethod
    def merge(cls, parts: Sequence[Metrics]) -> Metrics:
        """Metrics on the data of all parts together."""
        count = sum(part.examples for part in parts)
        score = sum(part.score * part.examples for part in parts) / count
        return cls(score, sum(part.loss * part.examples for part in parts) / count, count)


class ForgettingReport(NamedTuple):
    """How much of an adaptation the source data allow."""

    share: float
    """Weight of the grown modules, in [0, 1]."""
    rise: float
    """Increase of the loss on the source data at that weight, relative to the host's loss there."""


@dataclass(frozen=True)
class FineTuneConfig:
    """How every structure is trained and measured."""

    loss: Loss
    score: Measure | None
    optimizer: MakeOptimizer
    epochs: int
    source: Sequence[Any]
    """Batches of data that must not be forgotten: even ones are replayed in training, odd ones measure forgetting."""
    tolerance: float
    """Largest allowed relative increase of the loss on the source data."""
    seed: int


class Trainer:
    """Trains structures on a model, one at a time, each from new modules.

    Args:
        model: With a frozen host and free slots.
        config: How structures are trained and measured.

    Raises:
        ConfigError: the loss on the source data is not above zero, or is not a number.
    """

    def __init__(self, model: GrowingModel, config: FineTuneConfig) -> None:
        self.model, self.config = model, config
        self._replayed, self._held_out = config.source[0::2], config.source[1::2]
        self._checked = False
        """Whether loss and score were found to be means."""
        self.source_loss = math.nan
        """Loss of the bare host on the held-out source batches; NaN without source data."""
        if config.source:
            self.source_loss = self.measure_host(self._held_out).loss
            if not self.source_loss > 0:
                raise ConfigError(
                    f"source: the loss there is {self.source_loss:g}, but a relative increase is defined for losses "
                    "above 0 alone"
                )

    def fit(self, structure: Structure, batches: Sequence[Any], *key: int) -> ForgettingReport:
        """Grow ``structure`` from new modules and train it on ``batches``, in an order that follows from ``key``.

        With source data each batch is learned together with a random source batch, their losses added. Afterwards the
        grown modules keep the greatest of `WEIGHTS` at which the loss on the held-out source batches is within the
        tolerance.

        Raises:
            ConfigError: the loss or the optimizer cannot be used.
            DivergedError: the loss is no longer finite.
        """
        model, config = self.model, self.config

        # Plant the structure on the bare host.
        model.swap(None)
        for place, name in enumerate(model.slots):
            if name in structure:
                model.slots[name].germinate(structure[name], module_generator(config.seed, place, 0))
        optimizer = self._make_optimizer()

        # Train it, its weight rising from zero.
        order = torch_generator(config.seed, *key, Stream.DATA_ORDER)
        step, steps = 0, config.epochs * len(batches)
        model.train()
        with seed_torch(config.seed):
            for _ in range(config.epochs):
                for index in torch.randperm(len(batches), generator=order):
                    step += 1
                    self._set_weight(min(1.0, step / (WARMUP * steps)))
                    optimizer.zero_grad()
                    loss = self._compute_loss(batches[int(index)])
                    if config.source:
                        replayed = int(torch.randint(len(self._replayed), (), generator=order))
                        loss = loss + self._compute_loss(self._replayed[replayed])
                    if not loss.requires_grad:
                        raise ConfigError(
                            "loss(model, batch) does not depend on what grows: compute it from the model's output"
                        )
                    loss.backward()
                    optimizer.step()
        model.eval()

        # Reduce its weight until the source data are remembered well enough.
        if not config.source:
            return ForgettingReport(1.0, 0.0)
        for weight in WEIGHTS:
            self._set_weight(weight)
            rise = self.measure(self._held_out).loss / self.source_loss - 1
            if rise <= config.tolerance:
                return ForgettingReport(weight, rise)
        return ForgettingReport(0.0, 0.0)

    def measure_host(self, batches: Sequence[Any]) -> Metrics:
        """Measure the bare host on ``batches``, as `measure` does.

        Raises:
            ConfigError: the loss or the score cannot be used, is not finite, or is a sum over examples.
        """
        try:
            metrics = self.measure(batches)
            if not self._checked:
                self._checked = True
                self._require_means(batches)
            return metrics
        except DivergedError as error:
            raise ConfigError(
                f"{error} for the host without growth: check the batches for empty ones and NaN"
            ) from error

    @torch.no_grad()
    def measure(self, batches: Sequence[Any]) -> Metrics:
        """Measure the model in evaluation mode on ``batches``; without a score function the score is minus the loss.

        Random losses and scores, as those of diffusion models, draw the same numbers in every call.

        Raises:
            ConfigError: the loss or the score cannot be used, or there is no example.
            DivergedError: the loss is not finite.
        """
        model, score = self.model.eval(), self.config.score
        losses, scores, count = 0.0, 0.0, 0
        with seed_torch(self.config.seed):
            for batch in batches:
                loss = float(self._compute_loss(batch))
                examples = len(model.tap.get_inputs())
                losses += examples * loss
                scores += examples * (-loss if score is None else self._compute_score(batch))
                count += examples
        if not count:
            raise ConfigError("the batches contain no example: remove empty batches")
        return Metrics(scores / count, losses / count, count)

    @torch.no_grad()
    def _require_means(self, batches: Sequence[Any]) -> None:
        """Refuse a loss or a score that is a sum, which means over batches of several sizes would weight twice."""
        model, measures = self.model.eval(), {"loss": self._compute_loss, "score": self._compute_score}
        for name, compute in measures.items():
            if name == "score" and self.config.score is None:
                continue

            def compute_number(batch: Any, compute: Callable[[Any], float | Tensor] = compute) -> float:
                with seed_torch(self.config.seed):
                    return float(compute(batch))

            with seed_torch(self.config.seed):
                self._compute_loss(batches[0])
            reduction = find_reduction(compute_number, batches[0], len(model.tap.get_inputs()))
            if reduction is Reduction.SUM:
                raise ConfigError(
                    f"{name}(model, batch) returned a sum over the examples (it doubles when the examples are "
                    "repeated): return their mean, so that all examples have equal weight"
                )

    def _compute_score(self, batch: Any) -> float:
        assert self.config.score is not None
        return _read_score(self.config.score(self.model, batch))

    def _set_weight(self, alpha: float) -> None:
        for name in self.model.seeds:
            self.model.slots[name].set_alpha(alpha)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        groups = self.model.parameter_groups()
        optimizer = self.config.optimizer(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"optimizer(groups) returned {describe_value(optimizer)}: it must return a torch optimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("optimizer(groups) returned LBFGS, which needs a closure: use one that does not")
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not all(id(parameter) in trained for seed in self.model.seeds.values() for parameter in seed.parameters()):
            raise ConfigError("optimizer(groups) returned an optimizer of other parameters: pass it the groups")
        return optimizer

    def _compute_loss(self, batch: Any) -> Tensor:
        self.model.tap.clear()
        loss = self.config.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"loss(model, batch) returned {describe_value(loss)}: it must return a tensor with one real number"
            )
        if not self.model.tap.called:
            raise ConfigError("loss(model, batch) does not call the model as a whole: compute the loss from model(...)")
        if not torch.isfinite(loss):
            raise DivergedError(f"loss(model, batch) is {float(loss.detach()):g}")
        return loss


@contextmanager
def seed_torch(seed: int) -> Generator[None]:
    """Seed torch's global generators, which dropout draws from, within the block; restore their states after it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _read_score(value: Any) -> float:
    try:
        score = read_number(value)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ConfigError(f"score(model, batch) returned {describe_value(value)}: it must return a finite number")
    return score
