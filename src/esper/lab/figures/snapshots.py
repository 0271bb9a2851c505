"""The picture of growth: one network at a few moments, with what lives in its slots and what that has earned."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from esper.dash.formats import difference, measure, signed_percent
from esper.lab.figures.drawing import INK, LABEL_SIZE, LINE, SOFT, VERMILION, WIDTHS, name_rows
from esper.lab.figures.exhibit import Figure, Query, Row, Rows
from esper.lab.figures.lanes import ON_BARS, STAGE_STYLES
from esper.lifecycle.stages import OWNING, Stage
from esper.runs.metric import METRIC_NAME

MOMENTS = 6
"""At most."""
_QUERY = """\
WITH RECURSIVE share(number) AS (
    SELECT 0 UNION ALL SELECT number + 1 FROM share WHERE number < {intervals}
), moments AS (
    SELECT DISTINCT CAST(round(number * (SELECT max(step) FROM slots) / {intervals}.0) AS INTEGER) AS step FROM share
), shown AS (
    SELECT slots.step, slots.slot, stage, slots.blueprint, alpha, contribution,
        COALESCE(decisions.metric, decisions.loss) AS value, added
    FROM moments JOIN slots USING (step) JOIN decisions USING (step)
)
SELECT step + 1 AS decision, {slot} AS slot_name, stage, blueprint, alpha, contribution,
    (SELECT {metric}) AS measure, value, added,
    (SELECT group_concat(ended.blueprint, ', ') FROM transitions AS ended
        WHERE ended.slot = shown.slot AND ended.after = 'pruned' AND ended.step <= shown.step) AS pruned
FROM shown ORDER BY step, slot
"""
_HOST, _SEED = (0.0, 0.16), (0.3, 1.0)
"""Left and right of what is drawn in a panel: the host's layer, and the seed behind it."""
_HEIGHT = 0.62
"""Of a box; slots are 1 apart."""
_LEAST = 0.05
"""Share of a box that is filled at least, to show the stage of a seed that does not count yet."""
_MARGIN, _ROW = 0.75, 0.42
"""Inches: of all that is no slot, and of a slot."""


def snapshots_figure(slot_name: str) -> Figure:
    """Of a run of one model; ``slot_name`` is the SQL that names a slot."""
    query = _QUERY.format(intervals=MOMENTS - 1, slot=slot_name, metric=METRIC_NAME)
    return Figure(
        "snapshots",
        "The network at a few moments, its input at the top: the host's layers in grey, behind each the seed that "
        "lives there, filled by the share of its alpha, with its contribution when last measured. Crossed out: what "
        "was pruned there.",
        Query(query),
        _draw,
        "no decision was made",
        columns=2,
    )


def _draw(canvas: Canvas, rows: Rows) -> None:
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
