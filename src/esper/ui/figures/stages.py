"""Stages of slots as lanes: one bar per time in a stage, with the stage's letter and the seed's blueprint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esper.lifecycle.stages import COOLDOWN, Stage
from esper.ui.figures.marks import GREEN, INK, LABEL_SIZE, ORANGE, SKY, VERMILION, YELLOW, name_rows
from esper.ui.figures.rows import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

LANE_HEIGHT = 0.3
"""Inches per slot."""
COLOURS = {
    Stage.GERMINATED: "#b3bccb",
    Stage.TRAINING: YELLOW,
    Stage.BLENDING: ORANGE,
    Stage.HOLDING: SKY,
    Stage.FOSSILIZED: GREEN,
    Stage.PRUNED: VERMILION,
}
GLYPHS = {
    Stage.GERMINATED: "g",
    Stage.TRAINING: "t",
    Stage.BLENDING: "b",
    Stage.HOLDING: "h",
    Stage.FOSSILIZED: "F",
    Stage.PRUNED: "x",
}
MEANINGS = {
    Stage.GERMINATED: "germinated",
    Stage.TRAINING: "training in isolation",
    Stage.BLENDING: "blending in",
    Stage.HOLDING: "held on trial",
    Stage.FOSSILIZED: "fossilized: kept for good",
    Stage.PRUNED: "pruned, slot cooling down",
}
_ON_BARS = "#1c2431"
"""Of letters: dark on every page, as the bars are light on every page."""
_BAR = 0.42
_ROOM_FOR_GLYPH = 0.02
"""A bar that takes a smaller share of the whole lane has no letter."""


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
        stage, decision, blueprint = _shown(str(row["stage"])), int(str(row["decision"])), row["blueprint"]
        resident = str(blueprint) if blueprint is not None and stage is not Stage.PRUNED else None
        last = found[-1] if found and before is not Stage.DORMANT else None
        if last is not None and (last.stage, last.blueprint) == (stage, resident):
            found[-1] = Span(stage, last.start, decision, resident)
        elif stage is not Stage.DORMANT:
            found.append(Span(stage, decision, decision, resident))
        before = stage
    return found


def _shown(name: str) -> Stage:
    """The cooldown's stages look the same."""
    stage = Stage[name.upper()]
    return Stage.PRUNED if stage in COOLDOWN else stage


def draw_lanes(axes: Axes, rows: Rows) -> set[Stage]:
    """A lane per ``slot_name``; the stages that were drawn."""
    slots = rows.by("slot_name")
    decisions = rows.numbers("decision")
    first, last = min(decisions), max(decisions)
    seen: set[Stage] = set()
    for place, part in enumerate(slots.values()):
        spans = find_spans(part)
        seen.update(span.stage for span in spans)
        _draw_lane(axes, place, spans, _ROOM_FOR_GLYPH * (last - first + 1))
    name_rows(axes, list(slots))
    axes.set_xlim(first - 0.5, last + 0.5)
    return seen


def _draw_lane(axes: Axes, place: int, spans: Sequence[Span], room: float) -> None:
    for span in spans:
        start, width = span.start - 0.5, span.end - span.start + 1.0
        axes.barh(place, width, _BAR, left=start, color=COLOURS[span.stage], linewidth=0)
        if width >= room:
            middle = start + width / 2
            axes.text(middle, place, GLYPHS[span.stage], **_label(_ON_BARS), ha="center", va="center_baseline")
    for start, blueprint in _births(spans):
        axes.text(start - 0.5, place - _BAR / 2 - 0.02, blueprint, **_label(INK), va="bottom", clip_on=True)


def _label(colour: str) -> dict[str, Any]:
    return {"fontsize": LABEL_SIZE - 1, "color": colour}


def _births(spans: Sequence[Span]) -> Iterator[tuple[int, str]]:
    """Where another blueprint begins, and its name."""
    before: str | None = None
    for span in spans:
        if span.blueprint is not None and (span.blueprint != before or span.stage is Stage.GERMINATED):
            yield span.start, span.blueprint
        before = span.blueprint


def explain_stages(canvas: Canvas, axes: Axes, seen: set[Stage]) -> None:
    """A legend above the whole figure of the stages that were drawn."""
    shown = [stage for stage in COLOURS if stage in seen]
    bars = [axes.barh(0, 0, color=COLOURS[stage]).patches[0] for stage in shown]
    words = [f"{GLYPHS[stage]}: {MEANINGS[stage]}" for stage in shown]
    if shown:
        canvas.legend(bars, words, loc="outside upper center", ncols=3, columnspacing=0.6, handlelength=1.2)
