"""`esper report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.errors import ConfigError, RunError
from esper.lab.figures.drawing import export_exhibits
from esper.lab.figures.exhibit import Figure, Table
from esper.lab.report.training import report_on
from esper.lab.standings import show_comparison


def command(paths: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path | None = None) -> None:
    """Write the report of a training run, a grown model or a comparison, also while it goes on.

    Of several evaluated runs that differ in their training seed alone, it is about their way of training.

    Args:
        paths: Directory of the run or the comparison; the page becomes its report.html. Of several runs, --out says
            where.
        out: Write the page here instead, with all figures as PDF, PNG and SVG and all tables as CSV beside it,
            each with the query or the files that its numbers come from.
    """
    match paths:
        case (path,):
            folder = out or path
        case (_, *_) if out is not None:
            folder = out
        case _:
            raise ConfigError("give the directory of a run or a comparison, or those of several runs and --out FOLDER")
    report = report_on(paths)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {folder} ({error.strerror}): choose another place") from error
    page = report.write(folder)
    console = Console()
    for title, found in report.comparisons.items():
        show_comparison(console, found, title)
    sys.stdout.write(f"report: {page}\n")
    if out is not None:
        exported = export_exhibits(out, report.exhibits)
        for reason in exported.absent:
            sys.stdout.write(f"left out {reason}\n")
        sys.stdout.write(
            f"{exported.figures} figures: {out / Figure.folder}\n{exported.tables} tables: {out / Table.folder}\n"
        )
