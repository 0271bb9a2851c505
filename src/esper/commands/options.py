"""Options and output that several commands share."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console

from esper.config.loading import dump_settings
from esper.config.settings import Settings
from esper.dash.output import print_line
from esper.errors import ConfigError
from esper.runs.run_directory import RunDirectory
from esper.signals import Terminated

RUNS = Path("runs")
"""Where runs go by default."""
LARGEST_SEED = 2**31 - 1


def require_seed(seed: int) -> None:
    """Check the option ``--seed``.

    Raises:
        ConfigError: it is below 0 or has more than 31 bits.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"--seed {seed}: it must be 0 to {LARGEST_SEED}")


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
