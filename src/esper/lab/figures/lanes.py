"""Lanes: the stages of slots over decisions, one bar per time in a stage, with its letter and the seed's blueprint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from esper.lab.figures.drawing import GREEN, INK, LABEL_SIZE, ORANGE, SKY, VERMILION, WIDTHS, YELLOW, name_rows
from esper.lab.figures.exhibit import Row, group_rows, read_numbers
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


def find_spans(rows: Sequence[Row]) -> list[Span]:
    """One slot's times in each stage, of rows with ``decision``, ``stage`` and ``blueprint`` in order.

    Dormant times are left out; the stages of a cooldown are one.
    """
    spans: list[Span] = []
    before = Stage.DORMANT
    for row in rows:
        stage, decision = Stage[str(row["stage"]).upper()], int(str(row["decision"]))
        blueprint = None if row["blueprint"] is None else str(row["blueprint"])
        # The stages of a cooldown are drawn as one, without a blueprint.
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
    slots = group_rows(rows, "slot_name")
    decisions = read_numbers(rows, "decision")
    first, last = min(decisions), max(decisions)
    stages: set[Stage] = set()
    for place, slot_rows in enumerate(slots.values()):
        blueprint: str | None = None
        for span in find_spans(slot_rows):
            stages.add(span.stage)

            # The bar, with the stage's letter if there is room.
            start, width, style = span.start - 0.5, span.end - span.start + 1.0, STAGE_STYLES[span.stage]
            axes.barh(place, width, _BAR, left=start, color=style.colour, linewidth=0)
            if width >= _ROOM_FOR_LETTER * (last - first + 1):
                middle = start + width / 2
                axes.text(
                    middle, place, style.letter, fontsize=_SMALL, color=ON_BARS, ha="center", va="center_baseline"
                )

            # The blueprint, where a seed begins.
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
