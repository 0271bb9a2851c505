"""`esper dash`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from esper.commands.options import RUNS
from esper.dash.run_view import RunFinder
from esper.errors import ConfigError
from esper.extras import describe_missing

try:
    from esper.dash.app import create_access, serve
except ModuleNotFoundError as error:
    raise ConfigError(describe_missing("ui", "`esper dash`", error.name)) from error

PORT = 8765


def command(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (RUNS,),
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    browser: bool = True,
) -> None:
    """Show runs in the browser, while they go on and afterwards; nothing can be changed there.

    Args:
        runs: Run directories, or folders that contain some; new runs show up by themselves.
        host: Address to serve on. Any but this machine's own demands a token.
        port: Port to serve on; 0 for any that is free.
        token: Secret that the address must contain; made up where one is needed and none is given.
        browser: Open the page in the browser.
    """
    for place in runs:
        if not os.path.exists(place):  # unlike Path.exists, it takes names that no file can have
            _print_line(f"there is no folder {place} yet: its runs show up once there are some")
    serve(RunFinder(runs), create_access(host, token), port, browser, _print_line)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
