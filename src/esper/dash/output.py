"""Plain lines on the terminal, and lines for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from esper.config.settings import SettingDifference


def console_beside(machine_readable: bool) -> Console:
    """Where people read: stderr if stdout is for a machine."""
    return Console(stderr=machine_readable)


def say(console: Console, line: str) -> None:
    """A line as it is: neither wrapped nor coloured, and no markup in it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def say_differences(console: Console, whose: str, found: Sequence[SettingDifference]) -> None:
    """A line for each key, or one that says that there is none."""
    say(console, f"{whose}: {'different from the defaults in' if found else 'the defaults'}")
    for one in found:
        say(console, f"  {one}")


def print_json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """A line of JSON on stdout."""
    sys.stdout.write(f"{json.dumps(record)}\n")
