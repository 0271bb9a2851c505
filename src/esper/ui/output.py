"""Plain lines on the terminal, and lines for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console


def console_beside(machine_readable: bool) -> Console:
    """Where people read: stderr if stdout is for a machine."""
    return Console(stderr=machine_readable)


def say(console: Console, line: str) -> None:
    """A line as it is: neither wrapped nor coloured, and no markup in it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """A line of JSON on stdout."""
    sys.stdout.write(f"{json.dumps(record)}\n")
