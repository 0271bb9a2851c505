"""What a task tells whoever waits for it, however it gets there: what it yields, and then its result or its error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Said:
    """The task goes on."""

    what: Any


@dataclass(frozen=True)
class Finished:
    """The task is done."""

    result: Any


@dataclass(frozen=True)
class Failed:
    """The task raised this; a note tells where."""

    error: Exception


Word = Said | Finished | Failed


def words(function: Callable[[Any], Generator[Any, None, Any]], task: Any) -> Generator[Word]:
    """All that the task says; the last word is its result or its error."""
    work = function(task)
    while True:
        try:
            said = next(work)
        except StopIteration as end:
            yield Finished(end.value)
            return
        except Exception as error:  # noqa: BLE001 (whatever it is, it is for the caller to handle)
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            yield Failed(error)
            return
        yield Said(said)
