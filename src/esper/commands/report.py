"""`esper report`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.dash.output import print_line
from esper.dash.reporter import report_progress
from esper.errors import ConfigError, RunError, plural
from esper.files import lock_folder
from esper.lab.figures.drawing import export_exhibits
from esper.lab.figures.exhibit import Exhibit, Figure, Table
from esper.lab.report import report_on
from esper.lab.standings import show_comparison


def command(
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path | None = None, bare: Path | None = None
) -> None:
    """Write the report of a training run, a grown model or a comparison. The run may still be in progress.

    Evaluated runs that differ only in their random seed share one report.

    Args:
        paths: Directory of a run or a comparison; the report is written to its report.html. Several runs need --out.
        out: Write the report to this folder instead, with all figures (PDF, PNG, SVG) and tables (CSV). Each states
            the query or files its numbers come from.
        bare: For a grown model: run of the same training loop with the controller "none", to compare with.
    """
    # One run or comparison keeps its own report; several need a folder for theirs.
    if not paths or (len(paths) > 1 and out is None):
        raise ConfigError("give the directory of one run or comparison, or several runs and --out FOLDER")
    folder = out or next(iter(paths))
    console = Console()
    with ExitStack() as locks:
        # The report is built before its folder, so that a mistake in the paths leaves nothing behind.
        with report_progress(console, "reading and drawing"):
            if os.path.isdir(folder):  # unlike Path.is_dir, it takes names that no file can have
                locks.enter_context(lock_folder(folder))  # what is read here must not change before it is written
            report = report_on(paths, bare)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {folder} ({error.strerror}): choose another place") from error
        # The page, its figures and its tables are of one report, also if another is written here at the same time.
        locks.enter_context(lock_folder(folder))
        page = report.write(folder)
        written: list[Exhibit] = []
        if out is not None:
            with report_progress(console, "writing figures and tables") as progress:
                written = export_exhibits(out, report.exhibits, progress.update)
    for title, comparison in report.comparisons.items():
        show_comparison(console, comparison, title)
    print_line(console, f"report: {page}")
    if out is not None:
        for exhibit in report.exhibits:
            if not exhibit.rows:
                print_line(console, f"left out {exhibit.name}: {exhibit.absent}")
        figures = sum(isinstance(exhibit, Figure) for exhibit in written)
        print_line(console, f"{plural(figures, 'figure')}: {out / Figure.folder}")
        print_line(console, f"{plural(len(written) - figures, 'table')}: {out / Table.folder}")
