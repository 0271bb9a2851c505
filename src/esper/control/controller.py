"""The interface of controllers, which decide about growth, and controllers in files of users (``FILE.py:NAME``)."""

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from esper.engine.observation import Observation
from esper.errors import ConfigError, did_you_mean
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import Head
from esper.lifecycle.rules import ActionMasks
from esper.lifecycle.table import Figures, SeedRating
from esper.numerics.arrays import Floats, Ints
from esper.serialization import from_plain
from esper.tasks.suite_files import allow_file, import_file, split_name

Actions = Ints


@runtime_checkable
class Controller(Protocol):
    """Decides for E networks at once, from an observation and what is legal.

    It has a state of any kind. To be saved in the middle of an episode the state must consist of arrays, tensors,
    numbers, text, tuples, lists, dictionaries and `esper.serialization.Stateful` objects.
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


@runtime_checkable
class SeedRater(Protocol):
    """A controller that keeps a seed from a threshold on: the same rating decides and explains the decision."""

    def rate_seeds(self, observation: Observation) -> SeedRating[Figures]:
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


_NAME = re.compile(r"\w[\w.+-]*")
"""Names of controllers: results are kept in files that are called after them."""


def is_in_file(name: str) -> bool:
    """Whether a controller's name is ``FILE.py:NAME``."""
    return split_name(name)[0] is not None


def hash_file(address: str) -> str:
    """The hash of the file that a controller is in, by which results of an earlier version of it are told apart."""
    return sha256(Path(str(split_name(address)[0])).read_bytes()).hexdigest()


def load_function(address: str, what: str) -> Callable[..., Any]:
    """The class or function at ``FILE.py:NAME``, which makes or is ``what`` in messages.

    The file is run as Python, in this process and in those that get objects of it, as whoever calls this has named it.
    """
    file, name = split_name(address)
    if file is None or os.pathsep in file or not Path(file).is_file():
        raise ConfigError(f"{what} {address}: there is no such file as {file or address}: give FILE.py:NAME")
    allow_file(file)
    # A user's file may raise anything.
    try:
        defined = vars(import_file(file))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} {address}: {file} cannot be run: {type(error).__name__}: {error}") from error
    found: Any = defined.get(name)
    if not callable(found):
        hint = did_you_mean(name, defined) or ": name one that it has"
        raise ConfigError(f"{what} {address}: {file} defines no class or function {name!r}{hint}")
    return found


def load_controller(address: str, horizon: int, taken: Collection[str] = ()) -> Controller:
    """The controller that the class or function at ``FILE.py:NAME`` makes for episodes of so many decisions.

    ``taken`` are names of other controllers, which this one cannot have.
    """
    create = load_function(address, "controller")
    try:
        controller: object = create(horizon)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"controller {address} cannot be made ({reason}): NAME is a class or a function, and is called with the "
            "number of decisions of an episode"
        ) from error
    if not isinstance(controller, Controller):
        raise ConfigError(
            f"controller {address} makes {type(controller).__name__}, which is no controller: give it a name and the "
            "methods start and act, as docs/how-to/own-controller.md shows"
        )
    if not _NAME.fullmatch(str(controller.name)) or controller.name in taken:
        others = f" that is not in use ({', '.join(taken)})" if taken else ""
        raise ConfigError(
            f"controller {address} is called {controller.name!r} in results: make its attribute `name` one of letters "
            f"and digits{others}"
        )
    return controller
