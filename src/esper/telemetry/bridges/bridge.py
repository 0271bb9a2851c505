"""Carries what is new in a run over to another tool, and keeps count of it.

Top to bottom: how far a bridge has come, in a small file beside the run; what it asks of the tool at its other end; the
tools there are, whose libraries are imported only when asked for; the bridge itself.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import ConfigError, RunError
from esper.extras import require
from esper.files import write_atomically
from esper.telemetry.bridges.tail import Figures, Tail

Value = str | int | float | bool


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


_ADAPTER = TypeAdapter(Cursor)


def load_cursor(path: Path) -> Cursor:
    """The cursor at `path`, or that of a new bridge if there is none; RunError if it cannot be read."""
    if not path.exists():
        return Cursor()
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunError(f"{path} does not say how far the bridge has come: remove it to begin anew elsewhere") from error


def save_cursor(path: Path, cursor: Cursor) -> None:
    """Keep the cursor, durably; RunError if it cannot be written."""
    write_atomically(path, _ADAPTER.dump_json(cursor))


@dataclass(frozen=True)
class Opening:
    """What a sink begins or goes on with."""

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


class Sink(Protocol):
    """A run in the hands of another tool.

    What a method was given is safe with the tool when it returns. A bridge that was killed may hand over its last
    piece a second time: the sink sees to it that it does not stand there twice.
    """

    @property
    def address(self) -> Address:
        """Where a later process finds the run."""
        ...

    def forget(self, after: int) -> bool:
        """Take back what came after that iteration; False if the tool cannot do that."""
        ...

    def iteration(self, figures: Figures) -> None:
        """Take an iteration; their numbers increase, but for those that were forgotten."""
        ...

    def history(self, lines: Sequence[str], iteration: int) -> None:
        """Take the whole history of the run in place of what was told before; `iteration` is the last one taken."""
        ...

    def close(self, outcome: str | None) -> None:
        """Finish; `outcome` is ``finished`` or ``failed``, or None if the run may go on."""
        ...


Connect = Callable[[Opening], Sink]
"""Reach the tool; ConfigError if that cannot be done."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """A tool: the library it needs and the extra that installs it, and the module with its sink."""

    library: str
    extra: str
    module: str

    def connect(self) -> Connect:
        """What opens a sink; ConfigError if the library is not installed."""
        require(self.extra, "this bridge", self.library)
        return cast("Connect", importlib.import_module(self.module).connect)


VENDORS = {
    "tensorboard": Vendor("tensorboardX", "tensorboard", "esper.telemetry.bridges.tensorboard"),
    "wandb": Vendor("wandb", "wandb", "esper.telemetry.bridges.wandb"),
    "mlflow": Vendor("mlflow", "mlflow", "esper.telemetry.bridges.mlflow"),
}
"""By the name that users ask for them."""


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


POLL_SECONDS = 1.0
"""Between looks at a run that goes on."""


@dataclass(frozen=True)
class Goal:
    """Where a run is to go."""

    tool: str
    connect: Connect
    destination: str | None
    """None for the tool's default, or where the run is already."""


class Bridge:
    """Hands over one iteration after the other, and remembers each at once, durably.

    A resumed run makes the iterations after its checkpoint anew, with equal figures: a tool that can forget forgets
    them first, any other keeps the first ones.
    """

    def __init__(self, tail: Tail, folder: Path, goal: Goal, name: str, settings: Mapping[str, Value]) -> None:
        """The cursor is kept in `folder`, which exists.

        Raises:
            ConfigError: the run goes to another destination already.
            RunError: the cursor cannot be read.
        """
        self._tail = tail
        self._folder = folder
        self._goal = goal
        self._name = name
        self._settings = settings
        self._file = folder / f"{goal.tool}.json"
        self._cursor = load_cursor(self._file)
        self._sink: Sink | None = None
        self._outcome: str | None = None
        self._require_same_destination()

    def carry(self) -> int:
        """Hand over what is new, and return how many iterations that were."""
        history, carried = self._tail.history(), 0
        self._outcome = history[-1].outcome if history else None
        for moment in history[self._cursor.moments :]:
            if moment.begins and moment.iteration < self._cursor.iteration:
                self._rewind(moment.iteration)
        self._remember(moments=len(history))
        while (figures := self._tail.figures(self._cursor.iteration)) is not None:
            self._open().iteration(figures)
            self._remember(iteration=figures.number)
            carried += 1
        # Before the first iteration the run's metadata are not complete.
        if len(history) > self._cursor.told and self._cursor.iteration >= 0:
            self._open().history([moment.line for moment in history], self._cursor.iteration)
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

    @property
    def destination(self) -> str | None:
        """Where the figures went; None as long as there are none."""
        return None if self._cursor.address is None else self._cursor.address.destination

    def close(self) -> None:
        """Let go of the tool, if it was reached."""
        if self._sink is not None:
            self._sink.close(self._outcome)

    def _require_same_destination(self) -> None:
        asked, known = self._goal.destination, self.destination
        if asked is not None and known is not None and asked != known:
            raise ConfigError(f"the run goes to {known} already: give no other destination, or remove {self._file}")

    def _rewind(self, iteration: int) -> None:
        if self._open().forget(iteration):
            self._remember(iteration=iteration)

    def _open(self) -> Sink:
        if self._sink is None:
            cursor = self._cursor
            destination = self._goal.destination
            description = flatten(self._tail.metadata())
            self._sink = self._goal.connect(
                Opening(
                    self._name,
                    self._folder,
                    destination,
                    cursor.address,
                    cursor.iteration,
                    self._settings,
                    description,
                )
            )
            self._remember(address=self._sink.address)
        return self._sink

    def _remember(self, **news: object) -> None:
        changed = replace(self._cursor, **news)
        if changed != self._cursor:
            save_cursor(self._file, changed)
            self._cursor = changed
