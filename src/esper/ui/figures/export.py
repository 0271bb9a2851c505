"""Writes figures and tables as files for papers, each beside its numbers and their source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.errors import RunError
from esper.files import write_atomically
from esper.ui.figures.canvas import draw_files
from esper.ui.figures.latex import latex
from esper.ui.figures.record import Exhibit, Figure


@dataclass(frozen=True)
class Exported:
    """What was written, and what there was nothing to show of."""

    figures: int
    tables: int
    absent: tuple[str, ...]
    """A name and a reason each."""


def export(folder: Path, exhibits: Sequence[Exhibit]) -> Exported:
    """Write all that can be shown into the folder, figures and tables in folders of their own, made if need be.

    Raises:
        RunError: a file cannot be written.
    """
    shown = [(what, rows) for what, rows in exhibits if rows]
    for what, rows in shown:
        visible = draw_files(what, rows) if isinstance(what, Figure) else {".tex": latex(what, rows)}
        _write(folder / what.folder / what.name, {**visible, ".csv": rows.csv(), what.source.suffix: what.source.text})
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
