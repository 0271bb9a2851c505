"""Figures and tables as files for papers: PDF, PNG, SVG, LaTeX (by the package booktabs), CSV, each with its source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.dash.formats import EN_DASH, MINUS
from esper.errors import RunError
from esper.files import write_atomically
from esper.lab.figures.drawing import draw_files
from esper.lab.figures.exhibit import Exhibit, Figure, Rows, Table

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    MINUS: r"$-$",
    EN_DASH: r"\textendash{}",
    # At the start of a row, these two would belong to the command that ended the row before.
    "[": "{[}",
    "*": "{*}",
    **{mark: f"\\{mark}" for mark in "{}$&#%_"},
}
_LONG = r"p{0.2\linewidth}"
"""Alignment of a column whose values take several lines."""


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
        inside = folder / what.folder
        try:
            inside.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {inside} ({error.strerror}): choose another --out") from error
        visible = draw_files(what, rows) if isinstance(what, Figure) else {".tex": to_latex(what, rows)}
        for suffix, content in {**visible, ".csv": rows.csv(), what.source.suffix: what.source.text}.items():
            write_atomically(inside / f"{what.name}{suffix}", content)
    figures = sum(isinstance(what, Figure) for what, _ in shown)
    absent = tuple(f"{what.name}: {what.absent}" for what, rows in exhibits if not rows)
    return Exported(figures, len(shown) - figures, absent)


def to_latex(table: Table, rows: Rows) -> str:
    """A table environment with caption and label."""
    columns = table.columns
    alignment = "".join(_LONG if one.long else "r" if one.write_number else "l" for one in columns)
    lines = [
        r"% In the preamble: \usepackage[T1]{fontenc}, \usepackage{textcomp}, \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        _row(column.heading for column in columns),
        r"\midrule",
        *(_row(f"{cell.text} {cell.note}".strip() for cell in row) for row in table.cells(rows)),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join([*lines, ""])


def _row(cells: Iterable[str]) -> str:
    return rf"{' & '.join(map(escape_latex, cells))} \\"


def escape_latex(text: str) -> str:
    """The text as LaTeX prints it; what cannot be printed becomes a space."""
    marks = "".join(_ESCAPES.get(mark, mark if mark.isprintable() else " ") for mark in text)
    return re.sub("-(?=-)", "-{}", marks)  # two in a row would become one dash
