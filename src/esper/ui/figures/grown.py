"""Figures of one model that grew: its learning, its slots' stages, what its seeds contribute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from esper.lifecycle.stages import COOLDOWN, Stage
from esper.telemetry.metric import METRIC_NAME
from esper.ui.figures.growing import SLOT_NAME
from esper.ui.figures.marks import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LABEL_SIZE,
    ORANGE,
    SKY,
    VERMILION,
    YELLOW,
    colour,
    count_iterations,
    dashes,
    few_ticks,
    legend_above,
    name_rows,
)
from esper.ui.figures.record import Figure, Query
from esper.ui.figures.rows import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

NO_DECISION = "no decision was made"

CURVES = Query(f"""\
SELECT about.metric AS measure, substr(name, 1, instr(name, '_') - 1) AS data, iteration AS decision, value
FROM scalars, (SELECT {METRIC_NAME} AS metric) AS about
WHERE name IN ('train_' || about.metric, 'validation_' || about.metric) AND about.metric != 'loss'
UNION ALL
SELECT 'loss', replace(name, '_loss', ''), iteration, value
FROM scalars WHERE name IN ('train_loss', 'validation_loss')
UNION ALL
SELECT 'added_parameters', 'seeds', iteration, value FROM scalars WHERE name = 'added_parameters'
UNION ALL
SELECT 'rollback', trouble, iteration, NULL FROM rollbacks
ORDER BY measure, data, decision
""")

STAGES = Query(f"""\
SELECT {SLOT_NAME} AS slot_name, step + 1 AS decision, stage, blueprint, alpha
FROM slots ORDER BY slot, step
""")

CHANGES = Query("""\
SELECT step, slot, before, after, blueprint, cause, reason FROM transitions ORDER BY id
""")

CONTRIBUTIONS = Query(f"""\
SELECT {SLOT_NAME} AS slot_name, step + 1 AS decision, contribution
FROM slots
WHERE slot IN (SELECT slot FROM slots WHERE contribution IS NOT NULL)
ORDER BY slot, step
""")

_PANELS = {"loss": "loss", "added_parameters": "added\nparameters"}
_EVENTS = "rollback"
_DATA = {"train": ORANGE, "validation": BLUE, "seeds": GREEN}
_COLOURS = {
    Stage.GERMINATED: "#d7dce4",
    Stage.TRAINING: YELLOW,
    Stage.BLENDING: ORANGE,
    Stage.HOLDING: SKY,
    Stage.FOSSILIZED: GREEN,
    Stage.PRUNED: VERMILION,
}
_BAR = 0.42
_ROW_HEIGHT = 0.26
_MARGIN = 0.95
"""Inches of the figure of stages that are not slots."""


def _draw_curves(canvas: Canvas, rows: Rows) -> None:
    measures = rows.by("measure")
    known = [name for name in _PANELS if name in measures]
    panels = [*(name for name in measures if name not in (*_PANELS, _EVENTS)), *known]
    column = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(column, panels, strict=True):
        for data, part in measures[name].by("data").items():
            axes.plot(part.numbers("decision"), part.numbers("value"), color=_DATA[data], label=data)
        for decision in measures[_EVENTS].numbers("decision") if _EVENTS in measures else []:
            axes.axvline(decision, color=VERMILION, linewidth=0.8, linestyle=":", label="rollback")
        axes.set_ylabel(_PANELS.get(name, name))
        if name == "added_parameters":
            axes.set_ylim(bottom=0)
        few_ticks(axes, 4)
    count_iterations(column[-1], "decision")
    found = {name: mark for axes in column for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    canvas.legend(found.values(), found.keys(), loc="outside upper center", ncols=4)
    canvas.align_ylabels()


def _draw_stages(canvas: Canvas, rows: Rows) -> None:
    slots = rows.by("slot_name")
    canvas.set_figheight(_MARGIN + _ROW_HEIGHT * len(slots))
    axes = canvas.subplots()
    seen: set[Stage] = set()
    for place, part in enumerate(slots.values()):
        stages = [_shown(name) for name in part.texts("stage")]
        seen.update(stages)
        _draw_lane(axes, place, part, stages)
    for stage, shade in _COLOURS.items():
        if stage in seen:
            axes.barh(0, 0, color=shade, label=stage.name.lower())
    name_rows(axes, list(slots))
    axes.set_xlim(min(rows.numbers("decision")) - 0.5, max(rows.numbers("decision")) + 0.5)
    count_iterations(axes, "decision")
    legend_above(canvas, axes)


def _draw_lane(axes: Axes, place: int, part: Rows, stages: Sequence[Stage]) -> None:
    """A bar per time in one stage; where a seed begins, its blueprint stands above."""
    decisions, blueprints = part.numbers("decision"), part.column("blueprint")
    before: tuple[Stage, str | None] = (Stage.DORMANT, None)
    for decision, stage, blueprint in zip(decisions, stages, blueprints, strict=True):
        if stage in _COLOURS:
            axes.barh(place, 1.0, _BAR, left=decision - 0.5, color=_COLOURS[stage], linewidth=0)
        if isinstance(blueprint, str) and before[1] != blueprint:
            style: dict[str, Any] = {"fontsize": LABEL_SIZE - 1, "color": BLACK, "va": "bottom", "clip_on": True}
            axes.text(decision - 0.5, place - _BAR / 2 - 0.02, blueprint, **style)
        before = (stage, blueprint if isinstance(blueprint, str) else None)


def _shown(name: str) -> Stage:
    """The cooldown's stages look the same."""
    stage = Stage[name.upper()]
    return Stage.PRUNED if stage in COOLDOWN else stage


def _draw_contributions(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    axes.axhline(0, color=GREY, linewidth=0.6)
    for index, (slot, part) in enumerate(rows.by("slot_name").items()):
        style: dict[str, Any] = {
            "color": colour(index),
            "linestyle": dashes(index),
            "label": slot,
            "marker": ".",
            "markersize": 2.5,
        }
        axes.plot(part.numbers("decision"), part.numbers("contribution"), **style)
    axes.set_ylabel("contribution")
    count_iterations(axes, "decision")
    legend_above(canvas, axes)


# Captions and headings say in braces where the words of `esper.ui.figures.about` go.
FIGURES = (
    Figure(
        "curves",
        "How the model learned: {measured} on training and validation data, and the parameters of all seeds. "
        "Vertical lines are rollbacks.",
        CURVES,
        _draw_curves,
        NO_DECISION,
        height=3.2,
    ),
    Figure(
        "stages",
        "What each slot went through; a seed's blueprint stands where it germinated.",
        STAGES,
        _draw_stages,
        NO_DECISION,
    ),
    Figure(
        "contributions",
        "{contributions}",
        CONTRIBUTIONS,
        _draw_contributions,
        "no contribution was measured",
    ),
)
