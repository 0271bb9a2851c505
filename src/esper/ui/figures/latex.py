"""Tables for LaTeX, with the rules of the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from esper.ui.figures.record import Table
from esper.ui.figures.rows import Rows
from esper.ui.formats import EN_DASH, MINUS

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


def escaped(text: str) -> str:
    """The text as LaTeX prints it; what cannot be printed becomes a space."""
    marks = "".join(_ESCAPES.get(mark, mark if mark.isprintable() else " ") for mark in text)
    return re.sub("-(?=-)", "-{}", marks)  # two in a row would become one dash


def latex(table: Table, rows: Rows) -> str:
    """A table environment with caption and label."""
    columns = table.columns
    alignment = "".join(_LONG if column.long else "r" if column.numeric else "l" for column in columns)
    written = [[f"{cell.text} {cell.note}".strip() for cell in row] for row in table.cells(rows)]
    lines = [
        r"% In the preamble: \usepackage[T1]{fontenc}, \usepackage{textcomp}, \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        _row(column.heading for column in columns),
        r"\midrule",
        *map(_row, written),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join([*lines, ""])


def _row(cells: Iterable[str]) -> str:
    return rf"{' & '.join(map(escaped, cells))} \\"
