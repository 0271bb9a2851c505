"""Plain lines on the terminal, and lines for machines."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from esper.config.settings import SettingDifference

SECONDS_BETWEEN_LINES = 30.0
"""The longest time without a line where there is no terminal."""


def console_beside(machine_readable: bool) -> Console:
    """Where people read: stderr if stdout is for a machine."""
    return Console(stderr=machine_readable)


def say(console: Console, line: str) -> None:
    """A line as it is: neither wrapped nor coloured, and no markup in it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class RegularLines:
    """Prints what is under way whenever no line came for 30 seconds; nothing on a terminal. It is a context manager."""

    def __init__(self, console: Console, describe_progress: Callable[[], str]) -> None:
        self._console = console
        self._describe_progress = describe_progress
        self._due = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_regularly, name="progress lines", daemon=True)

    def __enter__(self) -> Self:
        self.postpone()
        if not self._console.is_terminal:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def postpone(self) -> None:
        """Count the 30 seconds from now, as somebody else has just printed a line."""
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES

    def _print_regularly(self) -> None:
        while not self._ended.wait(max(self._due - time.monotonic(), 0.0)):
            if time.monotonic() >= self._due:
                say(self._console, self._describe_progress())
                self.postpone()


def say_differences(console: Console, whose: str, found: Sequence[SettingDifference]) -> None:
    """A line for each key, or one that says that there is none."""
    say(console, f"{whose}: {'different from the defaults in' if found else 'the defaults'}")
    for one in found:
        say(console, f"  {one}")


def print_json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """A line of JSON on stdout."""
    sys.stdout.write(f"{json.dumps(record)}\n")
