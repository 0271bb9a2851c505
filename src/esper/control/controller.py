"""The interface of controllers: everything that decides about growth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from esper.engine.observation import Observation
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import Head
from esper.lifecycle.legality import ActionMasks
from esper.numerics.arrays import Bools, Floats, Ints
from esper.serialization.state_files import from_plain

Actions = Ints
Figures: TypeAlias = NDArray[np.floating[Any]]
"""Numbers of any precision."""


@runtime_checkable
class Controller(Protocol):
    """Decides for E networks at once, from an observation and what is legal.

    It has a state of any kind. To be saved in the middle of an episode the state must consist of arrays, tensors,
    numbers, text, tuples, lists, dictionaries and `esper.serialization.state_files.Stateful` objects.
    """

    name: str

    def start(self, seeds: Sequence[int]) -> Any:
        """The state before the first decision; the randomness of network i follows from ``seeds[i]`` alone."""
        ...

    def act(self, observation: Observation, masks: ActionMasks, state: Any) -> tuple[Actions, Any]:
        """Legal actions int64 ``[E, 8]`` and the next state."""
        ...


@runtime_checkable
class PromiseReader(Protocol):
    """A controller that reads what blueprints promise, with the settings by which it is measured."""

    promise: PromiseSettings | None
    """How promise is measured for it; None: it does not use it."""


def get_promise_settings(controller: Controller) -> PromiseSettings | None:
    """How promise is measured for a controller; None: it does not read it."""
    return controller.promise if isinstance(controller, PromiseReader) else None


@dataclass(frozen=True)
class SeedRating:
    """What seeds are worth and must be worth to be kept, ``[E, S]`` each; NaN where that is not known.

    Two conditions decide. By the score a seed must be worth its price; by the loss, the finer measure of the two, it
    must be better than nothing beyond noise.
    """

    contribution: Figures
    """Measured contribution of the seed to the score."""
    error: Figures
    """Standard error of the contribution."""
    price: Figures
    """Rent that the seed adds to the network's, in units of the score."""
    threshold: Figures
    """Contribution from which the seed is kept, its price included."""
    loss_gain: Figures
    """How much lower the validation loss is with the seed, as a share of the present loss."""
    loss_error: Figures
    """Standard error of ``loss_gain`` over validation examples; 0 where it is not known."""
    loss_threshold: Figures
    """``loss_gain`` from which the seed is kept; NaN where only the score decides."""

    @property
    def worth_keeping(self) -> Bools:
        """Whether the seed reaches both, ``[E, S]``; False where its contribution was not measured."""
        return (self.contribution >= self.threshold) & ~(self.loss_gain < self.loss_threshold)


@runtime_checkable
class SeedRater(Protocol):
    """A controller that keeps a seed from a threshold on: the same rating decides and explains the decision."""

    def rate_seeds(self, observation: Observation) -> SeedRating:
        """The rating of every seed that `Controller.act` goes by, whether or not a seed is due."""
        ...


@dataclass(frozen=True)
class CandidateRating:
    """What candidates promise."""

    worth: Figures
    """What is left of a candidate's promise after its price, ``[E, S, K]``; -inf where no promise was measured."""
    threshold: float
    """A candidate may be planted if its worth is above it."""
    rank: Figures
    """Of those the one with the largest rank is planted, ``[E, S, K]``."""


@runtime_checkable
class CandidateRater(Protocol):
    """A controller that plants a candidate above a threshold: the same rating decides and explains the decision."""

    def rate_candidates(self, observation: Observation) -> CandidateRating:
        """The rating of every candidate that `Controller.act` goes by, whether or not it may be planted now."""
        ...


class UniformStreams:
    """One stream of uniform random numbers per network, so that no network's draws depend on its neighbours."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def draw(self) -> Floats:
        """One number in [0, 1) per network and head, ``[E, 8]``."""
        return np.stack([generator.random(len(Head)) for generator in self._generators])

    def state_dict(self) -> dict[str, Any]:
        """The positions of the streams, as plain values."""
        return {"streams": [generator.bit_generator.state for generator in self._generators]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called."""
        values = from_plain(self.state_dict(), state, "random streams")
        for generator, position in zip(self._generators, values["streams"], strict=True):
            generator.bit_generator.state = position
