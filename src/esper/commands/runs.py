"""`esper runs` and `esper dash`."""

import os
import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Interval
from rich.console import Console
from rich.text import Text

from esper.commands.options import RUNS
from esper.dash.formats import measure
from esper.dash.output import plain_table, print_json, print_line
from esper.dash.run_view import RunFinder
from esper.errors import ConfigError, escape_unprintable
from esper.extras import describe_missing
from esper.runs.run_directory import RunDirectory, RunState, list_runs

MEGABYTE = 1e6
PORT = 8765
_STYLES = {RunState.RUNNING: "green", RunState.FAILED: "red", RunState.DAMAGED: "red", RunState.INTERRUPTED: "yellow"}


def print_runs(folder: Annotated[Path, tyro.conf.Positional] = RUNS, json: bool = False) -> None:
    """List the runs in a folder, newest first.

    "greedy" is the score of a training run's greedy policy on fixed training problems. "value" is the latest metric on
    validation data: J while the policy explores, or for growing models accuracy, loss or your own metric.

    Args:
        folder: Folder with runs.
        json: Print the list as JSON.
    """
    console = Console()
    runs = list_runs(folder)
    if json:
        figures = [{**asdict(run.progress), **asdict(run.progress.metric), "size": run.size} for run in runs]
        rows = zip(runs, figures, strict=True)
        print_json([{"run": str(run.path), **each, "trouble": run.failure} for run, each in rows])
        return
    if not runs:
        quoted = shlex.quote(str(folder))
        is_run = RunDirectory(folder).store.is_file()
        advice = f"{folder} is itself a run: use `esper report {quoted}`"
        print_line(console, advice if is_run else f"no runs in {folder}: `esper train` creates one")
        return

    numbers = ("done", "greedy", "value", "MB")
    table = plain_table("run", "command", "state", "done", "greedy", "value", "started", "MB", numbers=numbers)
    for run in runs:
        progress = run.progress
        value, probe, started = progress.value, progress.probe_score, progress.started
        table.add_row(
            Text(escape_unprintable(run.path.name)),
            Text(escape_unprintable(progress.command)),
            Text(progress.state, _STYLES.get(progress.state, "")),
            f"{progress.done}" if progress.total is None else f"{progress.done}/{progress.total}",
            "" if probe is None else measure(probe),
            "" if value is None else Text(escape_unprintable(f"{progress.metric.metric} {measure(value)}")),
            "" if started is None else f"{datetime.fromtimestamp(started).astimezone():%Y-%m-%d %H:%M}",
            f"{run.size / MEGABYTE:.1f}",
        )
    console.print(table)
    for run in runs:
        if run.failure:
            print_line(console, escape_unprintable(run.failure))


def serve_runs(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (RUNS,),
    host: str = "127.0.0.1",
    port: Annotated[int, Interval(ge=0, le=65_535)] = PORT,
    token: str | None = None,
    browser: bool = True,
) -> None:
    """Show runs in the browser, finished or in progress. The dashboard never changes a run.

    Args:
        runs: Run directories, or folders with runs. New runs appear automatically.
        host: Address to serve on. An address that other machines can reach requires a token.
        port: Port to serve on; 0: any free port.
        token: Secret that the URL must contain (default: a random one where a token is required).
        browser: Open the page in the browser.
    """
    # An extra, whose absence is an error of the user's and not of the program; the help needs none.
    try:
        from esper.dash.app import create_access, serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(describe_missing("ui", "`esper dash`", error.name)) from error
    console = Console()
    for place in runs:
        if not os.path.exists(place):  # unlike Path.exists, it takes names that no file can have
            print_line(console, f"folder {place} does not exist yet: its runs will appear once it does")
    serve(RunFinder(runs), create_access(host, token), port, browser, lambda line: print_line(console, line))
