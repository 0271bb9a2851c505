"""`esper dash`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Interval

from esper.commands.options import RUNS
from esper.dash.run_view import RunFinder
from esper.errors import ConfigError
from esper.extras import describe_missing
from esper.files import print_line

PORT = 8765


def command(
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
    for place in runs:
        if not os.path.exists(place):  # unlike Path.exists, it takes names that no file can have
            print_line(f"folder {place} does not exist yet: its runs will appear once it does")
    serve(RunFinder(runs), create_access(host, token), port, browser, print_line)
