"""The list of runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.errors import EsperError
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import RunDirectory, read_progress
from esper.ui.dash.queries.values import plain

_TOLD = ("suite", "task", "host", "controller", "seed", "environments")


def overview(stores: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Every run: what it is and how it stands; a run that cannot be read has its `error` instead."""
    return [_summary(name, store) for name, store in stores.items()]


def _summary(name: str, store: Path) -> dict[str, Any]:
    try:
        with RunReader.open(store) as reader:
            progress, metadata = read_progress(RunDirectory(store.parent), reader), reader.metadata()
    except EsperError as error:
        return {"name": name, "error": str(error)}
    return {
        "name": name,
        "command": progress.command,
        "state": str(progress.state),
        "done": progress.done,
        "total": progress.total,
        "started": progress.started,
        **{key: plain(metadata.get(key)) for key in _TOLD},
    }
