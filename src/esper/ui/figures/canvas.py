"""Drawing by matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any

from esper.extras import require
from esper.ui.figures.record import Figure
from esper.ui.figures.rows import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WIDTH = 3.35
"""Inches: a column of a paper in two columns."""
DOTS_PER_INCH = 300
SUFFIXES = (".pdf", ".png")

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ed",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "pdf.fonttype": 42,  # whole fonts, which publishers ask for
    "text.parse_math": False,  # names are names, whatever is in them
    "text.usetex": False,
}
_METADATA: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".png": {"Software": None}}
"""Equal figures are equal bytes: no dates, no versions."""


def require_matplotlib() -> None:
    """ConfigError if matplotlib is not installed."""
    require("report", "drawing figures", "matplotlib")


def drawn(figure: Figure, rows: Rows) -> dict[str, bytes]:
    """The figure's files by their suffix.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # what a user's matplotlibrc says must not change a figure
        matplotlib.rcParams.update(_STYLE)
        canvas: Canvas = importlib.import_module("matplotlib.figure").Figure(
            figsize=(WIDTH, figure.height), dpi=DOTS_PER_INCH, layout="constrained"
        )
        figure.draw(canvas, rows)
        return {suffix: _bytes(canvas, suffix) for suffix in SUFFIXES}


def _bytes(canvas: Canvas, suffix: str) -> bytes:
    file = io.BytesIO()
    canvas.savefig(file, format=suffix.removeprefix("."), metadata=_METADATA[suffix])
    return file.getvalue()
