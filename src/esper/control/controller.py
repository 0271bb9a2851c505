"""The interface of controllers: everything that decides about growth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from esper.engine.observation import Observation
from esper.engine.promises import PromiseSettings
from esper.lifecycle.actions import Head
from esper.lifecycle.legality import ActionMasks
from esper.numerics.arrays import Floats, Ints
from esper.serialization.state_files import from_plain

Actions = Ints


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
        """Continue from where `state_dict` was called.

        Raises:
            CheckpointError: the state is of another number of networks.
        """
        values = from_plain(self.state_dict(), state, "random streams")
        for generator, position in zip(self._generators, values["streams"], strict=True):
            generator.bit_generator.state = position
