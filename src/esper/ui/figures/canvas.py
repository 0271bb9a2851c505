"""Drawing by matplotlib: files for papers, and SVG for pages."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from esper.ui.figures.marks import INK, LINE, PAPER, SOFT
from esper.ui.figures.record import Figure
from esper.ui.figures.rows import Rows, Value

WIDTHS = {1: 3.35, 2: 6.9}
"""Inches of so many columns of a paper in two columns."""
DOTS_PER_INCH = 300

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first comes with matplotlib
    "font.size": 7,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 7,
    "axes.titlesize": 7.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": SOFT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 6.5,
    "xtick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 6.5,
    "ytick.major.width": 0.6,
    "ytick.major.size": 2.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "pdf.fonttype": 42,  # whole fonts, which publishers ask for
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "esper",  # names inside a drawing follow from what it shows
    "text.parse_math": False,  # names are names, whatever is in them
    "text.usetex": False,
}
_TRANSPARENT = {"figure.facecolor": "none", "axes.facecolor": "none"}
_METADATA: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".png": {"Software": None}}
"""By the suffix of files. Equal figures are equal bytes: no dates, no versions."""
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", PAPER: "--paper"}
"""Colours that are the page's own, light or dark, by the names that its style sheet has for them."""
_NAMESPACE = re.compile(r"\{[^}]*\}")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""What XML cannot hold."""
_LARGEST = 1e300


def draw_files(figure: Figure, rows: Rows) -> dict[str, bytes]:
    """The figure's files by their suffix."""
    files: dict[str, bytes] = {}
    with _drawn(figure, rows, {}) as canvas:
        for suffix, metadata in _METADATA.items():
            file = io.BytesIO()
            canvas.savefig(file, format=suffix.removeprefix("."), metadata=metadata)
            files[suffix] = file.getvalue()
    return files


def draw_svg(figure: Figure, rows: Rows) -> str:
    """The figure as an element of an HTML page, named by its caption for those who cannot see it.

    It is as wide as the page lets it be. Neutral colours are variables of the page's style sheet.
    """
    file = io.StringIO()
    with _drawn(figure, rows, _TRANSPARENT) as canvas:
        FigureCanvasSVG(canvas).print_svg(file, metadata=_NO_METADATA)  # savefig would draw everything twice
    root = ET.fromstring(file.getvalue())
    targets = set(re.findall(r"#([\w-]+)", " ".join(value for one in root.iter() for value in one.attrib.values())))
    for one in root.iter():
        one.tag = _NAMESPACE.sub("", one.tag)
        one.attrib = {_NAMESPACE.sub("", name): value for name, value in one.attrib.items()}
        if one.get("id") not in targets:
            one.attrib.pop("id", None)
        if style := one.get("style"):
            one.set("style", _with_variables(style))
        for style_sheet in one.findall("{*}style"):
            one.remove(style_sheet)  # it would hold for the whole page
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": _printable(figure.caption)}
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)


def _with_variables(style: str) -> str:
    for colour, name in _VARIABLES.items():
        style = style.replace(colour, f"var({name})")
    return style


@contextmanager
def _drawn(figure: Figure, rows: Rows, background: Mapping[Any, Any]) -> Generator[Canvas]:
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks: readers' own fonts have them
        mpl.rcdefaults()  # what a user's matplotlibrc says must not change a figure
        mpl.rcParams.update({**_STYLE, **background})
        size = (WIDTHS[figure.columns], figure.height)
        canvas = Canvas(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
        figure.draw(canvas, Rows(rows.columns, tuple(tuple(map(_drawable, row)) for row in rows.values)))
        yield canvas


def _drawable(value: Value) -> Value:
    """What no font or format chokes on, and whose differences are finite; None for numbers beyond that."""
    if isinstance(value, str):
        return _printable(value)
    return None if isinstance(value, float) and abs(value) > _LARGEST else value


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
