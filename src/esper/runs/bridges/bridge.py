"""Carries what is new in a run over to another tool, and keeps count of it in a small file beside the run.

Each tool has a logger, a class in a module of its own, whose library is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import ConfigError, RunError
from esper.extras import require
from esper.files import write_atomically
from esper.runs.bridges.tail import Figures, Tail

Value = str | int | float | bool

LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""What each tool's logger imports; the extra that installs it and the module here bear the name of the tool."""
POLL_SECONDS = 1.0
"""Between looks at a run that goes on."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a run's figures go."""

    destination: str
    """A folder, project or URI, as the tool understands it."""
    run: str
    """The tool's own name of the run there."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """What has been carried over."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    address: Address | None = None
    """None before anything was."""
    iteration: int = -1
    """The last one that was handed over."""
    moments: int = 0
    """How much of the run's history was looked through for rewinds."""
    told: int = 0
    """How much of it was handed over."""


_CURSOR = TypeAdapter(Cursor)


@dataclass(frozen=True)
class Opening:
    """What a logger begins or goes on with."""

    name: str
    """Of the run, for people."""
    folder: Path
    """Where it may keep files; it exists."""
    destination: str | None
    """What the user asked for; None for the tool's default."""
    address: Address | None
    """Where the run is already, if an earlier process has begun."""
    after: int
    """The last iteration that is known to have arrived; -1 for none."""
    settings: Mapping[str, Value]
    """The run's configuration under flat names."""
    description: Mapping[str, Value]
    """The run's metadata under flat names."""


class Logger(ABC):
    """A run in the hands of another tool.

    What a method was given is safe with the tool when it returns. A bridge that was killed may hand over its last
    piece a second time: the logger sees to it that it does not stand there twice.
    """

    address: Address
    """Where a later process finds the run."""

    def forget(self, after: int) -> bool:
        """Take back what came after that iteration; False if the tool cannot do that."""
        return False

    @abstractmethod
    def log_iteration(self, figures: Figures) -> None:
        """Take an iteration; their numbers increase, but for those that were forgotten."""

    @abstractmethod
    def log_history(self, lines: Sequence[str], iteration: int) -> None:
        """Take the whole history of the run in place of what was told before; `iteration` is the last one taken."""

    @abstractmethod
    def close(self, outcome: str | None) -> None:
        """Finish; `outcome` is ``finished`` or ``failed``, or None if the run may go on."""


def load_logger(tool: str) -> Callable[[Opening], Logger]:
    """What opens a tool's logger; ConfigError if the library is not installed."""
    require(tool, "this bridge", LIBRARIES[tool])
    return cast("Callable[[Opening], Logger]", importlib.import_module(f"esper.runs.bridges.{tool}").open_logger)


@dataclass
class Bridge:
    """Hands over one iteration after the other, and remembers each at once, durably.

    A resumed run makes the iterations after its checkpoint anew, with equal figures: a tool that can forget forgets
    them first, any other keeps the first ones.

    Raises:
        ConfigError: the run goes to another destination already.
        RunError: the cursor cannot be read.
    """

    tool: str
    open_logger: Callable[[Opening], Logger]
    """Reach the tool; ConfigError if that cannot be done."""
    tail: Tail
    folder: Path
    """Keeps the cursor; it exists."""
    name: str
    settings: Mapping[str, Value]
    asked: str | None = None
    """The destination; None for the tool's default, or where the run is already."""
    _logger: Logger | None = field(default=None, init=False)
    _outcome: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._file = self.folder / f"{self.tool}.json"
        try:
            known = _CURSOR.validate_json(self._file.read_bytes()) if self._file.exists() else Cursor()
        except (OSError, ValidationError) as error:
            advice = "remove it to begin anew elsewhere"
            raise RunError(f"{self._file} does not say how far the bridge has come: {advice}") from error
        self._cursor = known
        if None not in (self.asked, self.destination) and self.asked != self.destination:
            advice = f"give no other destination, or remove {self._file}"
            raise ConfigError(f"the run goes to {self.destination} already: {advice}")

    @property
    def destination(self) -> str | None:
        """Where the figures went; None as long as there are none."""
        return None if self._cursor.address is None else self._cursor.address.destination

    def carry(self) -> int:
        """Hand over what is new, and return how many iterations that were."""
        history, carried = self.tail.history(), 0
        self._outcome = history[-1].outcome if history else None
        for moment in history[self._cursor.moments :]:
            rewound = moment.begins and moment.iteration < self._cursor.iteration
            if rewound and self._open().forget(moment.iteration):
                self._remember(iteration=moment.iteration)
        self._remember(moments=len(history))
        while (figures := self.tail.figures(self._cursor.iteration)) is not None:
            self._open().log_iteration(figures)
            self._remember(iteration=figures.number)
            carried += 1
        # Before the first iteration the run's metadata are not complete.
        if len(history) > self._cursor.told and self._cursor.iteration >= 0:
            self._open().log_history([moment.line for moment in history], self._cursor.iteration)
            self._remember(told=len(history))
        return carried

    def follow(self, in_use: Callable[[], bool], show: Callable[[int], None]) -> None:
        """Carry until the run has ended and nobody uses it; ``show`` is told of iterations that were handed over."""
        while True:
            idle = not in_use()
            if carried := self.carry():
                show(carried)
            if idle and self._outcome is not None:
                return
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Let go of the tool, if it was reached."""
        if self._logger is not None:
            self._logger.close(self._outcome)

    def _open(self) -> Logger:
        if self._logger is None:
            cursor, description = self._cursor, flatten(self.tail.metadata())
            self._logger = self.open_logger(
                Opening(
                    name=self.name,
                    folder=self.folder,
                    destination=self.asked,
                    address=cursor.address,
                    after=cursor.iteration,
                    settings=self.settings,
                    description=description,
                )
            )
            self._remember(address=self._logger.address)
        return self._logger

    def _remember(self, **news: object) -> None:
        changed = replace(self._cursor, **news)
        if changed != self._cursor:
            write_atomically(self._file, _CURSOR.dump_json(changed))
            self._cursor = changed


def flatten(nested: Any) -> dict[str, Value]:
    """Numbers, truth values and texts by their path, as in ``ppo.gamma`` or ``reward.0.mode``; nothing for None.

    A list of such values becomes one text.
    """
    return dict(_leaves(nested, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Value):
        yield path, value
    elif isinstance(value, dict):
        for key, part in cast("dict[str, Any]", value).items():
            yield from _leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        parts = cast("list[Any]", value)
        if all(isinstance(part, Value) for part in parts):
            yield path, ", ".join(map(str, parts))
        else:
            for index, part in enumerate(parts):
                yield from _leaves(part, f"{path}.{index}")
