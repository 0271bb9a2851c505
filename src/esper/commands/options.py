"""Options and output that several commands share."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

from annotated_types import Interval
from rich.console import Console

from esper.config.loading import dump_settings
from esper.config.settings import MOST_AT_ONCE, Settings
from esper.dash.output import print_line
from esper.runs.run_directory import RunDirectory
from esper.signals import Terminated

RUNS = Path("runs")
"""Where runs go by default."""
# Types of options with bounds, which `esper.cli` checks before a command does anything.

Seed = Annotated[int, Interval(ge=0, le=2**31 - 1)]
"""A random seed."""
Instances = Annotated[int, Interval(ge=0, le=MOST_AT_ONCE)]
"""A number of instances, which are all made before the first is played."""


@contextmanager
def hint_if_stopped(console: Console, hint: str) -> Generator[None]:
    """Context manager that prints how to go on if Ctrl-C or SIGTERM stops the command."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        print_line(console, hint)
        raise


@contextmanager
def hold_run(
    resume: Path | None, run_dir: Path | None, settings: Settings, console: Console
) -> Generator[RunDirectory]:
    """Context manager of a locked run: the one to resume, or a new one with these settings.

    A new run is made in ``run_dir``, or in a folder of `RUNS` named by the time. If the command is stopped, the way to
    resume the run is printed.

    Raises:
        RunError: there is no such run, another process has locked it, or the directory of the new run is not empty.
    """
    if resume is None:
        run = RunDirectory.create(run_dir or RUNS / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"))
    else:
        run = RunDirectory.open_training_run(resume)
    hint = hint_if_stopped(console, f"resume with: {run.command} --resume {shlex.quote(str(run.path))}")
    with run.locked(run.command), hint:
        # Checked again under the lock: another process may have started a run here meanwhile.
        if resume is None:
            run.require_empty()
            dump_settings(settings, run.config)
        yield run
