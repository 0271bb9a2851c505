"""`esper export-events`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from esper.runs.export import EventFormat, export_events
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory


def command(
    run: Annotated[Path, tyro.conf.Positional],
    to: Annotated[EventFormat, tyro.conf.EnumChoicesFromValues],
    out: Path,
) -> None:
    """Write all events of a run to one file, also while the run goes on.

    docs/events.md tells what they mean.

    Args:
        run: Directory of the run.
        to: jsonl (an object per line), csv, or parquet (needs pyarrow); the latter two keep the payload as JSON.
        out: The file to write.
    """
    with RunReader.open(RunDirectory.open(run).store) as reader:
        count = export_events(reader, to, out)
    sys.stdout.write(f"exported: {count} events to {out}\n")
