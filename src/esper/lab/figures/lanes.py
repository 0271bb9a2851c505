"""Pictures of slots: their stages as lanes over the decisions, and the whole network at a few moments.

A lane has one bar per time in a stage, with the stage's letter and the seed's blueprint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from esper.dash.formats import difference, measure, signed_percent
from esper.lab.figures.drawing import (
    GREEN,
    INK,
    LABEL_SIZE,
    LINE,
    ORANGE,
    SKY,
    SOFT,
    VERMILION,
    WIDTHS,
    YELLOW,
    name_rows,
)
from esper.lab.figures.exhibit import Figure, Query, Row, Rows
from esper.lifecycle.stages import COOLDOWN, OWNING, Stage
from esper.runs.metric import METRIC_NAME

SLOT_NAME = "COALESCE((SELECT json_extract(value, '$[' || slot || ']') FROM metadata WHERE key = 'slots'), slot)"
"""SQL for the name of the slot with a number."""
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
    Stage.HOLDING: StageStyle(SKY, "h", "held on trial"),
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


def find_spans(rows: Rows) -> list[Span]:
    """One slot's stages, of rows with ``decision``, ``stage`` and ``blueprint`` in order.

    Dormant times are left out; the stages of a cooldown are one.
    """
    spans: list[Span] = []
    before = Stage.DORMANT
    for row in rows.mappings():
        stage, decision, blueprint = Stage[str(row["stage"]).upper()], int(str(row["decision"])), row["blueprint"]
        if stage in COOLDOWN:
            stage, blueprint = Stage.PRUNED, None
        resident = None if blueprint is None else str(blueprint)
        if before is not Stage.DORMANT and (spans[-1].stage, spans[-1].blueprint) == (stage, resident):
            spans[-1] = Span(stage, spans[-1].start, decision, resident)
        elif stage is not Stage.DORMANT:
            spans.append(Span(stage, decision, decision, resident))
        before = stage
    return spans


def draw_lanes(axes: Axes, rows: Rows) -> set[Stage]:
    """A lane per ``slot_name``; the stages that were drawn."""
    slots = rows.by("slot_name")
    decisions = rows.numbers("decision")
    first, last = min(decisions), max(decisions)
    seen: set[Stage] = set()
    for place, part in enumerate(slots.values()):
        blueprint: str | None = None
        for span in find_spans(part):
            seen.add(span.stage)
            _draw_bar(axes, place, span, _ROOM_FOR_LETTER * (last - first + 1))
            if span.blueprint is not None and (span.blueprint != blueprint or span.stage is Stage.GERMINATED):
                above = place - _BAR / 2 - 0.02
                axes.text(
                    span.start - 0.5, above, span.blueprint, fontsize=_SMALL, color=INK, va="bottom", clip_on=True
                )
            blueprint = span.blueprint
    name_rows(axes, list(slots))
    axes.set_xlim(first - 0.5, last + 0.5)
    return seen


def _draw_bar(axes: Axes, place: int, span: Span, room: float) -> None:
    start, width, style = span.start - 0.5, span.end - span.start + 1.0, STAGE_STYLES[span.stage]
    axes.barh(place, width, _BAR, left=start, color=style.colour, linewidth=0)
    if width >= room:
        middle = start + width / 2
        axes.text(middle, place, style.letter, fontsize=_SMALL, color=ON_BARS, ha="center", va="center_baseline")


def explain_stages(canvas: Canvas, axes: Axes, seen: set[Stage]) -> None:
    """A legend above the whole figure of the stages that were drawn."""
    styles = [style for stage, style in STAGE_STYLES.items() if stage in seen]
    bars = [axes.barh(0, 0, color=style.colour).patches[0] for style in styles]
    words = [f"{style.letter}: {style.meaning}" for style in styles]
    if styles:
        ncols = 3 if canvas.get_figwidth() > WIDTHS[1] else 2
        canvas.legend(bars, words, loc="outside upper center", ncols=ncols, columnspacing=0.6, handlelength=1.2)


# Snapshots -----------------------------------------------------------------------------------------------------------

MOMENTS = 6
"""At most."""
_QUERY = f"""\
WITH RECURSIVE share(number) AS (
    SELECT 0 UNION ALL SELECT number + 1 FROM share WHERE number < {MOMENTS - 1}
), moments AS (
    SELECT DISTINCT CAST(round(number * (SELECT max(step) FROM slots) / {MOMENTS - 1}.0) AS INTEGER) AS step FROM share
), shown AS (
    SELECT slots.step, slots.slot, stage, slots.blueprint, alpha, contribution,
        COALESCE(decisions.metric, decisions.loss) AS value, added
    FROM moments JOIN slots USING (step) JOIN decisions USING (step)
)
SELECT step + 1 AS decision, {SLOT_NAME} AS slot_name, stage, blueprint, alpha, contribution,
    (SELECT {METRIC_NAME}) AS measure, value, added,
    (SELECT group_concat(ended.blueprint, ', ') FROM transitions AS ended
        WHERE ended.slot = shown.slot AND ended.after = 'pruned' AND ended.step <= shown.step) AS pruned
FROM shown ORDER BY step, slot
"""
_HOST, _SEED = (0.0, 0.16), (0.3, 1.0)
"""Left and right of what is drawn in a panel: the host's layer, and the seed behind it."""
_HEIGHT = 0.62
"""Height of a box; slots are 1 apart."""
_LEAST = 0.05
"""Share of a box that is filled at least, to show the stage of a seed that does not count yet."""
_MARGIN, _ROW = 0.75, 0.42
"""Inches: of all that is no slot, and of a slot."""


def _draw_snapshots(canvas: Canvas, rows: Rows) -> None:
    moments = list(rows.by("decision").values())
    slots = list(rows.by("slot_name"))
    canvas.set_size_inches(WIDTHS[2], _MARGIN + _ROW * len(slots))
    panels = canvas.subplots(1, len(moments), sharey=True, squeeze=False)[0]
    seen: set[Stage] = set()
    for axes, moment in zip(panels, moments, strict=True):
        seen |= _draw_moment(axes, moment)
    name_rows(panels[0], slots)
    styles = [style for stage, style in STAGE_STYLES.items() if stage in seen]
    boxes = [Patch(color=style.colour) for style in styles]
    if styles:
        canvas.legend(boxes, [style.meaning for style in styles], loc="outside upper center", ncols=len(styles))


def _draw_moment(axes: Axes, rows: Rows) -> set[Stage]:
    """One panel; the stages of the seeds in it."""
    records = rows.mappings()
    first = records[0]
    axes.set_title(f"decision {first['decision']}", fontsize=LABEL_SIZE + 0.5, loc="center")
    figures = (
        f"{first['measure']} {measure(_number(first['value']))}\n{signed_percent(_number(first['added']))} parameters"
    )
    axes.set_xlabel(figures, fontsize=LABEL_SIZE)
    axes.set_xlim(-0.04, 1.04)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.plot([sum(_HOST) / 2] * 2, [-0.5, len(records) - 0.5], color=SOFT, linewidth=0.8, zorder=1)
    return {stage for place, row in enumerate(records) if (stage := _draw_slot(axes, place, row)) is not None}


def _draw_slot(axes: Axes, place: int, row: Row) -> Stage | None:
    """A layer of the host and the seed behind it, whose stage is returned; None where no seed lives."""
    top = place - _HEIGHT / 2
    _draw_box(axes, _HOST, top, 1.0, SOFT)
    stage = Stage[str(row["stage"]).upper()]
    middle = sum(_SEED) / 2
    small: dict[str, Any] = {"fontsize": LABEL_SIZE - 0.5, "ha": "center", "va": "center", "clip_on": True}
    if stage not in OWNING:
        _draw_frame(axes, top, LINE)
        if row["pruned"] is not None:
            axes.text(middle, place, f"\N{MULTIPLICATION SIGN} {row['pruned']}", color=VERMILION, **small)
        return None
    axes.plot([_HOST[1], _SEED[0]], [place, place], color=SOFT, linewidth=0.8, zorder=1)
    alpha, earned = _number(row["alpha"]), _number(row["contribution"])
    _draw_box(axes, _SEED, top, max(alpha, _LEAST), STAGE_STYLES[stage].colour)
    _draw_frame(axes, top, SOFT)
    ink = ON_BARS if alpha > 0.5 else INK
    axes.text(middle, place - 0.13, str(row["blueprint"]), color=ink, **small)
    if not math.isnan(earned):
        axes.text(middle, place + 0.15, difference(earned), color=ink, **small)
    return stage


def _draw_box(axes: Axes, sides: tuple[float, float], top: float, share: float, colour: str) -> None:
    left, right = sides
    axes.add_patch(Rectangle((left, top), share * (right - left), _HEIGHT, facecolor=colour, linewidth=0, zorder=2))


def _draw_frame(axes: Axes, top: float, colour: str) -> None:
    left, right = _SEED
    axes.add_patch(Rectangle((left, top), right - left, _HEIGHT, fill=False, edgecolor=colour, linewidth=0.6))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


SNAPSHOTS = Figure(
    "snapshots",
    "The network at a few moments, its input at the top: the host's layers in grey, behind each the seed that "
    "lives there, filled by the share of its alpha, with its contribution when last measured. Crossed out: what "
    "was pruned there.",
    Query(_QUERY),
    _draw_snapshots,
    "no decision was made",
    columns=2,
)
