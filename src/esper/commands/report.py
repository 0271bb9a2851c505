"""`esper report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from esper.experiments.run_directory import RunDirectory
from esper.ui.report import write_report


def command(run: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write a run's report.html anew, also while the run goes on.

    Args:
        run: Directory of the run.
    """
    sys.stdout.write(f"report: {write_report(RunDirectory.open(run))}\n")
