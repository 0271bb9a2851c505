"""What several commands take and show."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from esper.config.loading import dump_settings
from esper.config.settings import Settings
from esper.dash.formats import duration
from esper.dash.output import RegularLines, print_line
from esper.errors import ConfigError
from esper.runs.run_directory import RunDirectory
from esper.signals import Terminated

RUNS = Path("runs")
"""Where runs go by default."""
LARGEST_SEED = 2**31 - 1


def require_seed(seed: int) -> None:
    """Refuse what no source of randomness takes, as settings do.

    Raises:
        ConfigError: it is below 0 or beyond 31 bits.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"--seed {seed}: it must be 0 to {LARGEST_SEED}")


@contextmanager
def progress_bar(console: Console) -> Generator[Progress]:
    """What is under way, how much of it is done, and the time that it took and takes: a bar, or a line now and then."""

    def describe_progress() -> str:
        (task,) = bar.tasks
        done = "" if task.total is None else f", {task.completed:.0f} of {task.total:.0f} done"
        return f"{task.description}{done}, {duration(task.elapsed or 0.0)} elapsed"

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
    with bar, RegularLines(console, describe_progress):
        yield bar


@contextmanager
def hint_if_stopped(console: Console, hint: str) -> Generator[None]:
    """Say how to go on if Ctrl-C or SIGTERM comes meanwhile."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        print_line(console, hint)
        raise


@contextmanager
def hold_run(
    resume: Path | None, run_dir: Path | None, settings: Settings, console: Console
) -> Generator[RunDirectory]:
    """The run to resume, or else a new one with these settings, held meanwhile; says how to go on if it is stopped.

    A new one lies in ``run_dir``, or under `RUNS`, named by the time.

    Raises:
        RunError: there is no such run, somebody else holds it, or there is something where the new one should be.
    """
    if resume is None:
        run = RunDirectory.create(run_dir or RUNS / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"))
    else:
        run = RunDirectory.open_training_run(resume)
    hint = hint_if_stopped(console, f"resume with: {run.command} --resume {shlex.quote(str(run.path))}")
    with run.locked(run.command), hint:
        if resume is None:
            run.require_empty()
            dump_settings(settings, run.config)
        yield run
