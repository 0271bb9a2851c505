"""Drawing by matplotlib: one style, files for papers, SVG for pages, and the axes and legends that figures share.

Tables are written as CSV beside the figures, each with its source.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from esper.dash.formats import score
from esper.errors import RunError
from esper.files import write_atomically
from esper.lab.figures.exhibit import Exhibit, Figure, Rows, Value

BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#e69f00"
SKY, PURPLE, YELLOW = "#56b4e9", "#cc79a7", "#f0e442"
INK, SOFT, LINE, PAPER = "#1c2430", "#5b6675", "#e3e7ed", "#ffffff"
"""For text, for what matters less, for grids, and for the background: on a page they follow its style sheet."""
GREY = "#7f8fa6"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK, YELLOW)
"""Which the colour-blind tell apart (Okabe and Ito, 2008): C0, C1, ... of every figure."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LABEL_SIZE = 6
ROW_HEIGHT = 0.19
"""Inches of a row in a figure of rows."""

_DASHES = ("-", "--", "-.", ":")
_LABEL_GAP = 0.075
"""Between labels, as a share of the height."""
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
    "axes.prop_cycle": f"cycler(color={COLOURS})",
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
_NO_METADATA: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"), None)
_METADATA: dict[str, dict[str, None]] = {
    ".pdf": {"CreationDate": None},
    ".png": {"Software": None},
    ".svg": _NO_METADATA,
}
"""By the suffix of files. Equal figures are equal bytes: no dates, no versions."""
_VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", PAPER: "--paper"}
"""Colours that are the page's own, light or dark, by the names that its style sheet has for them."""
_NAMESPACE = re.compile(r"\{[^}]*\}")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""What XML cannot hold."""
_LARGEST = 1e300


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
        drawings = draw_files(what, rows) if isinstance(what, Figure) else {}
        for suffix, content in {**drawings, ".csv": rows.csv(), what.source.suffix: what.source.text}.items():
            write_atomically(inside / f"{what.name}{suffix}", content)
    figures = sum(isinstance(what, Figure) for what, _ in shown)
    absent = tuple(f"{what.name}: {what.absent}" for what, rows in exhibits if not rows)
    return Exported(figures, len(shown) - figures, absent)


def draw_files(figure: Figure, rows: Rows) -> dict[str, bytes]:
    """The figure's files by their suffix."""
    files: dict[str, bytes] = {}
    with _draw(figure, rows, {}) as canvas:
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
    with _draw(figure, rows, _TRANSPARENT) as canvas:
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
def _draw(figure: Figure, rows: Rows, background: Mapping[Any, Any]) -> Generator[Canvas]:
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


def legend_above(canvas: Canvas, columns: int = 4) -> None:
    """What all axes label, each once, above the whole figure."""
    marks = {name: mark for axes in canvas.axes for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    canvas.legend(marks.values(), marks.keys(), loc="outside upper center", ncols=columns)


def count_along(axes: Axes, unit: str = "iteration") -> None:
    """A horizontal axis with whole numbers only."""
    axes.set_xlabel(unit)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def draw_lines(canvas: Canvas, parts: Mapping[str, Rows], x: str, y: str, title: str, **style: Any) -> Axes:
    """A line for each part, with dashes of its own wherever the colours come round, and for neighbours."""
    axes = canvas.subplots()
    for index, (name, part) in enumerate(parts.items()):
        dashes = _DASHES[(index + index // len(COLOURS)) % len(_DASHES)]
        axes.plot(part.numbers(x), part.numbers(y), color=f"C{index}", linestyle=dashes, label=name, **style)
    axes.set_ylabel(title)
    count_along(axes, x)
    legend_above(canvas)
    return axes


def draw_levels(axes: Axes, levels: Mapping[str, float]) -> None:
    """Dashed lines right across, named on their right, where names make room for each other."""
    low, high = axes.get_ylim()
    shares = [(value - low) / (high - low) for value in levels.values()]
    for (name, value), share, place in zip(levels.items(), shares, spread_apart(shares, _LABEL_GAP, 0, 1), strict=True):
        axes.axhline(value, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{name} {score(value)}",
            (1, share),
            (1.06, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=LABEL_SIZE,
            color=SOFT,
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": GREY, "shrinkA": 0, "shrinkB": 0},
        )


def spread_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places as little as it takes to lie ``gap`` apart, in their order, within low .. high if there is room."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [0.0] * len(places)
    floor = low
    for index in order:
        moved[index] = max(places[index], floor)
        floor = moved[index] + gap
    ceiling = high
    for index in reversed(order):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows from the top, named on the left."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
