"""What several commands take and show."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from esper.errors import ConfigError
from esper.signals import Terminated
from esper.ui.output import say

RUNS = Path("runs")
"""Where runs go by default."""
LARGEST_SEED = 2**31 - 1


def new_run_path(chosen: Path | None) -> Path:
    """The directory that was chosen for a run, or one under `RUNS` named by the time."""
    return chosen or RUNS / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")


def require_seed(seed: int) -> None:
    """Refuse what no source of randomness takes, as settings do.

    Raises:
        ConfigError: it is below 0 or beyond 31 bits.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"--seed {seed}: it must be 0 to {LARGEST_SEED}")


def progress_bar(console: Console) -> Progress:
    """What is under way, how much of it is done, and the time that it took and takes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


@contextmanager
def hint_if_stopped(console: Console, hint: str) -> Generator[None]:
    """Say how to go on if Ctrl-C or SIGTERM comes meanwhile."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        say(console, hint)
        raise
