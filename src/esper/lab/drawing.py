"""Drawing by matplotlib: one style, files for papers, SVG for pages, and what figures share. Tables become CSV."""

import csv
import io
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from esper.dash.formats import score
from esper.errors import RunError
from esper.files import write_atomically
from esper.lab.exhibit import Drawing, Exhibit, Row, Value, group_rows, read_numbers
from esper.lifecycle.table import COOLDOWN, Stage

BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#e69f00"
SKY, PURPLE, YELLOW = "#56b4e9", "#cc79a7", "#f0e442"
INK, SOFT, LINE, PAPER = "#1c2430", "#5b6675", "#e3e7ed", "#ffffff"
"""Text, what matters less, grids and background: on a page they follow its style sheet."""
GREY = "#7f8fa6"
COLOURS = (
    *(BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK, YELLOW),
    *("#6a51a3", "#8c6d31", "#e7298a", "#66a61e", "#b2182b", "#40c9b5", "#9e9ac8", "#c49c94"),
)
"""C0, C1, ... of every figure. The first eight can be distinguished by the colour-blind (Okabe and Ito, 2008)."""
LABEL_SIZE = 6
DASHED = (0, (4, 3))
"""Line style of levels to compare with."""
WIDTHS = {1: 3.35, 2: 6.9}
"""Inches of so many columns of a paper in two columns."""

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
_NO_METADATA: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"), None)
_METADATA: dict[str, dict[str, None]] = {
    ".pdf": {"CreationDate": None},
    ".png": {"Software": None},
    ".svg": _NO_METADATA,
}
"""By the suffix of files. Equal figures are equal bytes: no dates, no versions."""
_VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", PAPER: "--paper"}
"""Colours that are the page's own, light or dark, by the names in its style sheet."""
_NAMESPACE = re.compile(r"\{[^}]*\}")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML cannot hold."""


def export_exhibits(
    folder: Path, exhibits: Sequence[Exhibit], report: Callable[[int, int], None] = lambda _done, _total: None
) -> list[Exhibit]:
    """Write all that can be shown, and return it; ``report`` is called with the numbers of those done and of all."""
    shown = [exhibit for exhibit in exhibits if exhibit.rows]
    for done, exhibit in enumerate(shown):
        report(done, len(shown))
        inside = folder / exhibit.folder
        try:
            inside.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {inside} ({error.strerror}): choose another --out") from error
        # One drawing for all formats; the numbers and their source beside it.
        files: dict[str, bytes | str] = {}
        if isinstance(exhibit, Drawing):
            with _open_canvas(exhibit) as canvas:
                for suffix, metadata in _METADATA.items():
                    drawing = io.BytesIO()
                    canvas.savefig(drawing, format=suffix.removeprefix("."), metadata=metadata)
                    files[suffix] = drawing.getvalue()
        # Numbers in full, nothing for what is missing.
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([exhibit.rows[0], *(row.values() for row in exhibit.rows)])
        files |= {".csv": table.getvalue(), exhibit.source.suffix: exhibit.source.text}
        for suffix, content in files.items():
            write_atomically(inside / f"{exhibit.name}{suffix}", content)
    return shown


def draw_svg(figure: Drawing) -> str:
    """The figure as an element of an HTML page, with its caption for screen readers."""
    file = io.StringIO()
    with _open_canvas(figure, {"figure.facecolor": "none", "axes.facecolor": "none"}) as canvas:
        FigureCanvasSVG(canvas).print_svg(file, metadata=_NO_METADATA)  # savefig would draw everything twice
    root = ET.fromstring(file.getvalue())

    # Inside a page: no namespaces, no identifiers but those referred to, no style for the whole page; neutral colours
    # are variables of the page's style sheet.
    attributes = " ".join(value for element in root.iter() for value in element.attrib.values())
    targets = set(re.findall(r"#([\w-]+)", attributes))
    for element in root.iter():
        element.tag = _NAMESPACE.sub("", element.tag)
        element.attrib = {_NAMESPACE.sub("", name): value for name, value in element.attrib.items()}
        if element.get("id") not in targets:
            element.attrib.pop("id", None)
        if style := element.get("style"):
            for colour, name in _VARIABLES.items():
                style = style.replace(colour, f"var({name})")
            element.set("style", style)
        for style_sheet in element.findall("{*}style"):
            element.remove(style_sheet)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": _make_printable(figure.caption)}
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)


@contextmanager
def _open_canvas(figure: Drawing, background: Mapping[Any, Any] | None = None) -> Generator[Canvas]:
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks: readers' own fonts have them
        mpl.rcdefaults()  # a user's matplotlibrc must not change a figure
        mpl.rcParams.update({**_STYLE, **(background or {})})
        size = (WIDTHS[figure.columns], figure.height)
        canvas = Canvas(figsize=size, dpi=300, layout="constrained")
        figure.draw(canvas, [{name: _make_drawable(value) for name, value in row.items()} for row in figure.rows])
        # A curve of a single value would not be seen.
        for curve in (line for axes in canvas.axes for line in axes.lines if line.get_marker() == "None"):
            if np.isfinite(np.asarray(curve.get_ydata(), np.float64)).sum() == 1:
                curve.set_marker("o")
        yield canvas


def _make_drawable(value: Value) -> Value:
    """A value that every font and format takes; None for numbers whose differences are not finite."""
    if isinstance(value, str):
        return _make_printable(value)
    return None if isinstance(value, float) and abs(value) > 1e300 else value


def _make_printable(text: str) -> str:
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def plot_curve(axes: Axes, rows: Sequence[Row], x: str, y: str = "value", **style: Any) -> None:
    axes.plot(read_numbers(rows, x), read_numbers(rows, y), **style)


def add_legend(canvas: Canvas, columns: int = 4) -> None:
    """A legend above the figure with the labels of all axes, each once."""
    columns *= round(canvas.get_figwidth() / WIDTHS[1])
    marks = {name: mark for axes in canvas.axes for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    canvas.legend(marks.values(), marks.keys(), loc="outside upper center", ncols=columns)


def set_integer_axis(axes: Axes, unit: str = "iteration") -> None:
    axes.set_xlabel(unit)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def draw_levels(axes: Axes, levels: Mapping[str, float]) -> None:
    """Dashed lines right across, with names on the right that make room for each other."""
    # As shares of the axes' height, so that labels are kept apart by the size of their letters.
    low, high = axes.get_ylim()
    shares = [(value - low) / (high - low) for value in levels.values()]
    for (name, value), share, place in zip(levels.items(), shares, spread_apart(shares, 0.075, 0, 1), strict=True):
        axes.axhline(value, color=GREY, linewidth=0.7, linestyle=DASHED, zorder=1)
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
    # Upwards, each a gap above the one below it; then downwards, where the topmost were pushed out.
    floor, ceiling = low, high
    for index in order:
        moved[index] = max(places[index], floor)
        floor = moved[index] + gap
    for index in reversed(order):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Give the axes rows from the top, named on the left."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


LANE_HEIGHT = 0.3
"""Inches per slot."""


class StageStyle(NamedTuple):
    """How a stage is drawn and explained."""

    colour: str
    letter: str
    meaning: str


STAGE_STYLES = {
    Stage.GERMINATED: StageStyle("#b3bccb", "g", "germinated"),
    Stage.TRAINING: StageStyle(YELLOW, "t", "training in isolation"),
    Stage.BLENDING: StageStyle(ORANGE, "b", "blending in"),
    Stage.HOLDING: StageStyle(SKY, "h", "held on probation"),
    Stage.FOSSILIZED: StageStyle(GREEN, "F", "fossilized: kept for good"),
    Stage.PRUNED: StageStyle(VERMILION, "x", "pruned, slot cooling down"),
}
ON_BARS = "#1c2431"
"""For letters: dark on every page, as the bars are light on every page."""
_BAR = 0.42
_ROOM_FOR_LETTER = 0.02
"""A bar that takes a smaller share of the whole lane has no letter."""
_SMALL = LABEL_SIZE - 1


@dataclass(frozen=True)
class Span:
    """A slot's time in one stage: decisions ``start`` to ``end``, the first and the last, counted from 1."""

    stage: Stage
    start: int
    end: int
    blueprint: str | None


def find_spans(rows: Sequence[Row]) -> list[Span]:
    """One slot's times in each stage, from rows in order; without dormant times, and with a cooldown as one."""
    spans: list[Span] = []
    before = Stage.DORMANT
    for row in rows:
        stage, decision = Stage[str(row["stage"]).upper()], int(str(row["decision"]))
        blueprint = None if row["blueprint"] is None else str(row["blueprint"])
        if stage in COOLDOWN:
            stage, blueprint = Stage.PRUNED, None
        # The same seed in the same stage: the span goes on.
        if before is not Stage.DORMANT and (spans[-1].stage, spans[-1].blueprint) == (stage, blueprint):
            spans[-1] = Span(stage, spans[-1].start, decision, blueprint)
        elif stage is not Stage.DORMANT:
            spans.append(Span(stage, decision, decision, blueprint))
        before = stage
    return spans


def draw_lanes(axes: Axes, rows: Sequence[Row]) -> set[Stage]:
    """Draw a lane per ``slot_name``; returns the stages that were drawn."""
    slots, decisions = group_rows(rows, "slot_name"), read_numbers(rows, "decision")
    first, last = min(decisions), max(decisions)
    stages: set[Stage] = set()
    for place, slot_rows in enumerate(slots.values()):
        blueprint: str | None = None
        for span in find_spans(slot_rows):
            stages.add(span.stage)

            start, width, style = span.start - 0.5, span.end - span.start + 1.0, STAGE_STYLES[span.stage]
            axes.barh(place, width, _BAR, left=start, color=style.colour, linewidth=0)
            if width >= _ROOM_FOR_LETTER * (last - first + 1):
                letter: dict[str, Any] = {"fontsize": _SMALL, "ha": "center", "va": "center_baseline"}
                axes.text(start + width / 2, place, style.letter, color=ON_BARS, **letter)

            if span.blueprint is not None and (span.blueprint != blueprint or span.stage is Stage.GERMINATED):
                above = place - _BAR / 2 - 0.02
                axes.text(start, above, span.blueprint, fontsize=_SMALL, color=INK, va="bottom", clip_on=True)
            blueprint = span.blueprint
    name_rows(axes, list(slots))
    axes.set_xlim(first - 0.5, last + 0.5)
    return stages


def explain_stages(canvas: Canvas, axes: Axes, stages: set[Stage]) -> None:
    """A legend above the whole figure of the stages that were drawn."""
    styles = [style for stage, style in STAGE_STYLES.items() if stage in stages]
    bars = [axes.barh(0, 0, color=style.colour).patches[0] for style in styles]
    meanings = [f"{style.letter}: {style.meaning}" for style in styles]
    if styles:
        ncols = 3 if canvas.get_figwidth() > WIDTHS[1] else 2
        canvas.legend(bars, meanings, loc="outside upper center", ncols=ncols, columnspacing=0.6, handlelength=1.2)
