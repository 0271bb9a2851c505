"""Writes figures and tables as files for papers, each beside its numbers and their source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.errors import RunError
from esper.files import write_atomically
from esper.ui.figures.canvas import drawn, require_matplotlib
from esper.ui.figures.latex import latex
from esper.ui.figures.record import Exhibit, Figure

FIGURES = "figures"
TABLES = "tables"


@dataclass(frozen=True)
class Exported:
    """What was written, and what there was nothing to show of."""

    figures: int
    tables: int
    absent: tuple[str, ...]
    """A name and a reason each."""


def export(folder: Path, exhibits: Sequence[Exhibit]) -> Exported:
    """Write all that can be shown into ``figures`` and ``tables`` inside the folder, which is made if need be.

    Raises:
        ConfigError: matplotlib is not installed.
        RunError: a file cannot be written.
    """
    require_matplotlib()
    shown = [(what, rows) for what, rows in exhibits if rows]
    for what, rows in shown:
        if isinstance(what, Figure):
            place, visible = folder / FIGURES, drawn(what, rows)
        else:
            place, visible = folder / TABLES, {".tex": latex(what, rows)}
        _write(place / what.name, {**visible, ".csv": rows.csv(), what.source.suffix: what.source.text})
    figures = sum(isinstance(what, Figure) for what, _ in shown)
    absent = tuple(f"{what.name}: {what.absent}" for what, rows in exhibits if not rows)
    return Exported(figures, len(shown) - figures, absent)


def _write(stem: Path, contents: Mapping[str, bytes | str]) -> None:
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {stem.parent} ({error.strerror}): choose another --out") from error
    for suffix, content in contents.items():
        write_atomically(stem.with_name(f"{stem.name}{suffix}"), content)
