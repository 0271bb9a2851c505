"""`esper runs`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from esper.commands.options import RUNS
from esper.dash.formats import measure
from esper.dash.output import plain_table, print_json, print_line, printable
from esper.runs.run_directory import ListedRun, RunDirectory, RunProgress, RunState, list_runs

MEGABYTE = 1e6
_STYLES = {RunState.RUNNING: "green", RunState.FAILED: "red", RunState.DAMAGED: "red", RunState.INTERRUPTED: "yellow"}


def command(folder: Annotated[Path, tyro.conf.Positional] = RUNS, json: bool = False) -> None:
    """List the runs in a folder, the newest first.

    How a run does is told by its newest figure on validation data: J of a training run; of a growing model what growth
    is about, such as accuracy, the loss or your own metric. The probe is the greedy policy's score on the run's probe
    instances.

    Args:
        folder: Where the runs are.
        json: Print the list as a machine-readable last line.
    """
    console = Console()
    runs = list_runs(folder)
    if json:
        print_json([_to_json(run) for run in runs])
    elif not runs and RunDirectory(folder).store.is_file():
        quoted = shlex.quote(str(folder))
        print_line(console, f"{folder} is a run itself: `esper report {quoted}` shows it")
    elif not runs:
        print_line(console, f"no runs in {folder}: `esper train` makes one")
    else:
        _show(console, runs)


def _show(console: Console, runs: list[ListedRun]) -> None:
    table = plain_table("run", "command", "state", "done", "value", "probe", "started", "MB")
    for column in ("done", "value", "probe", "MB"):
        next(one for one in table.columns if one.header == column).justify = "right"
    for run in runs:
        progress = run.progress
        total = "" if progress.total is None else f"/{progress.total}"
        table.add_row(
            Text(printable(run.path.name)),
            Text(printable(progress.command)),
            Text(progress.state, _STYLES.get(progress.state, "")),
            f"{progress.done}{total}",
            _describe_result(progress),
            _format_number(progress.probe_score),
            _format_time(progress.started),
            f"{run.size / MEGABYTE:.1f}",
        )
    console.print(table)
    for run in runs:
        if run.trouble:
            print_line(console, printable(run.trouble))


def _describe_result(progress: RunProgress) -> Text:
    return Text() if progress.value is None else Text(printable(f"{progress.metric.metric} {measure(progress.value)}"))


def _format_number(value: float | None) -> str:
    return "" if value is None else measure(value)


def _format_time(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}"


def _to_json(run: ListedRun) -> dict[str, Any]:
    record = {**asdict(run.progress), **run.progress.metric.metadata()}
    return {"run": str(run.path), **record, "size": run.size, "trouble": run.trouble}
