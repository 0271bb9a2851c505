"""In what settings differ from the defaults, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from esper.differences import Difference
from esper.ui.output import say


def say_differences(console: Console, whose: str, found: Sequence[Difference]) -> None:
    """A line for each key, or one that says that there is none."""
    say(console, f"{whose}: {'different from the defaults in' if found else 'the defaults'}")
    for one in found:
        say(console, f"  {one}")
