"""Figures of one model that grew: its learning, its slots' stages, what its seeds contribute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from esper.telemetry.metric import METRIC_NAME
from esper.ui.figures.growing import SLOT_NAME
from esper.ui.figures.marks import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
    colour,
    count_iterations,
    dashes,
    few_ticks,
    legend_above,
)
from esper.ui.figures.record import Figure, Query
from esper.ui.figures.rows import Rows
from esper.ui.figures.stages import LANE_HEIGHT, draw_lanes, explain_stages

if TYPE_CHECKING:
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

CONTRIBUTIONS = Query(f"""\
SELECT {SLOT_NAME} AS slot_name, step + 1 AS decision, contribution
FROM slots
WHERE slot IN (SELECT slot FROM slots WHERE contribution IS NOT NULL)
ORDER BY slot, step
""")

ADDED = "added_parameters"
"""The measure of all seeds' parameters."""
_PANELS = {"loss": "loss", ADDED: "added\nparameters"}
_EVENTS = "rollback"
_DATA = {"train": ORANGE, "validation": BLUE, "seeds": GREEN}
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
        if name == ADDED:
            axes.set_ylim(bottom=0)
        few_ticks(axes, 4)
    count_iterations(column[-1], "decision")
    found = {name: mark for axes in column for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    canvas.legend(found.values(), found.keys(), loc="outside upper center", ncols=4)
    canvas.align_ylabels()


def _draw_stages(canvas: Canvas, rows: Rows) -> None:
    canvas.set_figheight(_MARGIN + LANE_HEIGHT * len(rows.by("slot_name")))
    axes = canvas.subplots()
    seen = draw_lanes(axes, rows)
    count_iterations(axes, "decision")
    explain_stages(canvas, axes, seen)


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
        "What each slot went through, one lane per slot over the decisions; a label names the blueprint that "
        "germinated there.",
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
