"""The interface of everything that decides about growth."""

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
    """Decides for E networks at once, from what it observes and what is legal, with a state of its own.

    The state is whatever the controller likes. To be saved in the middle of an episode it must consist of arrays,
    tensors, numbers, text, tuples, lists, dictionaries and `esper.serialization.state_files.Stateful` objects.
    """

    name: str

    def start(self, seeds: Sequence[int]) -> Any:
        """The state before the first decision; whatever is random for network i follows from ``seeds[i]``."""
        ...

    def act(self, observation: Observation, masks: ActionMasks, state: Any) -> tuple[Actions, Any]:
        """Legal actions int64 ``[E, 8]`` and the next state."""
        ...


@runtime_checkable
class PromiseReader(Protocol):
    """A controller that goes by what blueprints promise, and says how that is to be measured."""

    promise: PromiseSettings | None
    """How promises are measured for it; None: it does not use them."""


def get_promise_settings(controller: Controller) -> PromiseSettings | None:
    """How what blueprints promise is to be measured for it; None: it need not be."""
    return controller.promise if isinstance(controller, PromiseReader) else None


class UniformStreams:
    """One stream of uniform numbers per network, so that no network's draws depend on its neighbours."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def draw(self) -> Floats:
        """One number in [0, 1) per network and head, ``[E, 8]``."""
        return np.stack([generator.random(len(Head)) for generator in self._generators])

    def state_dict(self) -> dict[str, Any]:
        """Where the streams are, as plain values."""
        return {"streams": [generator.bit_generator.state for generator in self._generators]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of another number of networks.
        """
        values = from_plain(self.state_dict(), state, "random streams")
        for generator, reached in zip(self._generators, values["streams"], strict=True):
            generator.bit_generator.state = reached
