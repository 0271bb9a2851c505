"""`esper runs`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from esper.commands.options import RUNS
from esper.dash.formats import measure
from esper.dash.output import plain_table, print_json, print_line
from esper.errors import escape_unprintable
from esper.runs.run_directory import RunDirectory, RunState, list_runs

MEGABYTE = 1e6
_STYLES = {RunState.RUNNING: "green", RunState.FAILED: "red", RunState.DAMAGED: "red", RunState.INTERRUPTED: "yellow"}


def command(folder: Annotated[Path, tyro.conf.Positional] = RUNS, json: bool = False) -> None:
    """List the runs in a folder, newest first.

    "value" is the latest metric on validation data: J for training runs; accuracy, loss or your own metric for growing
    models. "probe" is the greedy policy's score on the run's probe instances.

    Args:
        folder: Folder with runs.
        json: Print the list as JSON.
    """
    console = Console()
    runs = list_runs(folder)
    if json:
        figures = [{**asdict(run.progress), **run.progress.metric.metadata(), "size": run.size} for run in runs]
        print_json(
            [{"run": str(run.path), **each, "trouble": run.failure} for run, each in zip(runs, figures, strict=True)]
        )
        return
    if not runs:
        quoted = shlex.quote(str(folder))
        is_run = RunDirectory(folder).store.is_file()
        advice = f"{folder} is itself a run: use `esper report {quoted}`"
        print_line(console, advice if is_run else f"no runs in {folder}: `esper train` creates one")
        return

    table = plain_table("run", "command", "state", "done", "value", "probe", "started", "MB")
    for column in table.columns:
        if column.header in ("done", "value", "probe", "MB"):
            column.justify = "right"
    for run in runs:
        progress = run.progress
        value, probe, started = progress.value, progress.probe_score, progress.started
        table.add_row(
            Text(escape_unprintable(run.path.name)),
            Text(escape_unprintable(progress.command)),
            Text(progress.state, _STYLES.get(progress.state, "")),
            f"{progress.done}" if progress.total is None else f"{progress.done}/{progress.total}",
            "" if value is None else Text(escape_unprintable(f"{progress.metric.metric} {measure(value)}")),
            "" if probe is None else measure(probe),
            "" if started is None else f"{datetime.fromtimestamp(started).astimezone():%Y-%m-%d %H:%M}",
            f"{run.size / MEGABYTE:.1f}",
        )
    console.print(table)
    for run in runs:
        if run.failure:
            print_line(console, escape_unprintable(run.failure))
