"""Stages of slots as lanes: one bar per time in a stage, with the stage's letter and the seed's blueprint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from esper.lab.figures.drawing import GREEN, INK, LABEL_SIZE, ORANGE, SKY, VERMILION, WIDTHS, YELLOW, name_rows
from esper.lab.figures.exhibit import Rows
from esper.lifecycle.stages import COOLDOWN, Stage

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
    found: list[Span] = []
    before = Stage.DORMANT
    for row in rows.mappings():
        stage, decision, blueprint = Stage[str(row["stage"]).upper()], int(str(row["decision"])), row["blueprint"]
        if stage in COOLDOWN:
            stage, blueprint = Stage.PRUNED, None
        resident = None if blueprint is None else str(blueprint)
        if before is not Stage.DORMANT and (found[-1].stage, found[-1].blueprint) == (stage, resident):
            found[-1] = Span(stage, found[-1].start, decision, resident)
        elif stage is not Stage.DORMANT:
            found.append(Span(stage, decision, decision, resident))
        before = stage
    return found


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
