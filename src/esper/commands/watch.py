"""`esper watch`."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import tyro

from esper.errors import ConfigError
from esper.extras import require
from esper.runs.follower import StoreFollower
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory


def command(run: Annotated[Path, tyro.conf.Positional]) -> None:
    """Watch a run in the terminal, also over ssh, while it goes on or after it.

    Keys 1 to 4 choose what is shown, the arrows and Enter a network, q quits.

    Args:
        run: Directory of the run.
    """
    directory = RunDirectory.open(run)
    if directory.store.is_file():
        RunReader.open(directory.store).close()
    require("ui", "`esper watch`", "textual")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`esper watch` needs a terminal: elsewhere, ask with `esper query` or read the report")
    from esper.dash.watch.app import Watch  # noqa: PLC0415

    with closing(StoreFollower(directory.store)) as follower:
        Watch(directory, follower).run(mouse=False)
