"""Figures and tables of one model that grew: its learning, its slots, its seeds' lives, its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from esper.dash.formats import count, difference, measure
from esper.lab.figures.drawing import BLUE, GREEN, GREY, ORANGE, VERMILION, count_along, draw_lines, legend_above
from esper.lab.figures.exhibit import Column, Exhibit, Figure, Query, Rows, Table, run_queries
from esper.lab.figures.lanes import LANE_HEIGHT, SLOT_NAME, SNAPSHOTS, draw_lanes, explain_stages
from esper.runs.metric import LOSS, METRIC_NAME, Metric, describe_contributions

ADDED = "added_parameters"
"""The measure of all seeds' parameters."""
_NO_DECISION = "no decision was made"
_PANELS = {LOSS: "loss", ADDED: "added\nparameters"}
_ROLLBACK = "rollback"
_DATA = {"train": ORANGE, "validation": BLUE, "seeds": GREEN}
_LANES_MARGIN = 1.1
"""Inches of the figure of stages that are not slots."""


def grown_exhibits(store: Path, metadata: Mapping[str, Any]) -> list[Exhibit]:
    """All of a run of a `Grower`.

    Raises:
        RunError: its store is missing, damaged or not ours.
    """
    return run_queries(store, [*grown_figures(metadata), *_grown_tables(metadata)])


def grown_figures(metadata: Mapping[str, Any]) -> list[Figure]:
    """Named after the run's own metric."""
    return [
        Figure(
            "curves",
            f"How the model learned: {_name_measures(Metric.from_metadata(metadata))} on training and "
            "validation data, and the "
            "parameters of all seeds. Vertical lines are rollbacks.",
            Query(f"""\
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
"""),
            _draw_curves,
            _NO_DECISION,
            height=3.2,
        ),
        Figure(
            "stages",
            "What each slot went through, one lane per slot over the decisions; a label names the blueprint that "
            "germinated there. Where the end of growth judged seeds, how that left the slots stands after the last "
            "decision.",
            Query(f"""\
WITH judged AS (
    SELECT slot, after FROM transitions
    WHERE cause = 'finish' AND iteration = (SELECT max(iteration) FROM decisions)
)
SELECT {SLOT_NAME} AS slot_name, step + 1 AS decision, stage, blueprint, alpha
FROM (
    SELECT slot, step, stage, blueprint, alpha FROM slots
    UNION ALL
    SELECT slot, step + 1, COALESCE(after, stage), CASE WHEN after = 'pruned' THEN NULL ELSE blueprint END,
        CASE WHEN after = 'pruned' THEN 0 ELSE alpha END
    FROM slots LEFT JOIN judged USING (slot)
    WHERE step = (SELECT max(step) FROM slots) AND EXISTS (SELECT * FROM judged)
)
ORDER BY slot, step
"""),
            _draw_stages,
            _NO_DECISION,
        ),
        Figure(
            "contributions",
            describe_contributions(metadata),
            Query(f"""\
SELECT {SLOT_NAME} AS slot_name, step + 1 AS decision, contribution
FROM slots
WHERE slot IN (SELECT slot FROM slots WHERE contribution IS NOT NULL)
ORDER BY slot, step
"""),
            _draw_contributions,
            "no contribution was measured",
        ),
        SNAPSHOTS,
    ]


def _grown_tables(metadata: Mapping[str, Any]) -> list[Table]:
    return [
        Table(
            "seeds",
            "The life of each seed, by the decisions with which it entered a stage. "
            f"{describe_contributions(metadata)}",
            Query(f"""\
SELECT {SLOT_NAME} AS slot_name, blueprint,
    germinated + 1 AS germinated, trained + 1 AS trained, blended + 1 AS blended, held + 1 AS held,
    COALESCE(fossilized, pruned) + 1 AS ended, outcome, cause, contribution
FROM seeds ORDER BY germinated, slot
"""),
            (
                Column("slot_name", title="slot"),
                Column("blueprint"),
                *(Column(name, count) for name in ("germinated", "blended", "held", "ended")),
                Column("outcome"),
                Column("contribution", difference),
            ),
            "no seed has germinated",
        ),
        _decisions_table(Metric.from_metadata(metadata)),
        Table(
            "rollbacks",
            "Every return to the last good state, with the validation loss before and after.",
            Query("""\
SELECT iteration AS decision, trouble, loss_before, loss_after, json_array_length(pruned) AS seeds_lost
FROM rollbacks ORDER BY id
"""),
            (
                Column("decision", count),
                Column("trouble"),
                Column("loss_before", measure),
                Column("loss_after", measure),
                Column("seeds_lost", count),
            ),
            "training never blew up",
        ),
    ]


def _decisions_table(about: Metric) -> Table:
    metric = [] if about.is_loss else [Column("metric", measure, about.metric)]
    return Table(
        "decisions",
        "Every decision with which something happened: what was decided, which slots changed their stage (finish: "
        "when growth ended after it), what "
        f"the gates ahead of seeds said anew, and the {_name_measures(about)} on validation data that it was made on.",
        Query(f"""\
WITH changed AS (
    SELECT iteration, group_concat({SLOT_NAME} || ' ' || before || ' to ' || after
        || CASE WHEN cause = 'finish' THEN ' (finish)' ELSE '' END, '; ') AS changes
    FROM (SELECT * FROM transitions ORDER BY id) GROUP BY iteration
), judged AS (
    SELECT iteration,
        group_concat({SLOT_NAME} || ' ' || gate || ' ' || CASE WHEN passed THEN 'passed'
            ELSE 'held back: ' || replace(reason, '_', ' ') END, '; ') AS verdicts
    FROM (SELECT * FROM gates ORDER BY id) GROUP BY iteration
)
SELECT iteration AS decision, op, {SLOT_NAME} AS slot_name, blueprint, changes, verdicts, loss, metric
FROM decisions LEFT JOIN changed USING (iteration) LEFT JOIN judged USING (iteration)
WHERE op != 'wait' OR changes IS NOT NULL OR verdicts IS NOT NULL
ORDER BY iteration
"""),
        (
            Column("decision", count),
            Column("op", title="operation"),
            Column("slot_name", title="slot"),
            Column("blueprint"),
            Column("changes", long=True),
            Column("verdicts", title="gates", long=True),
            Column("loss", measure),
            *metric,
        ),
        "all decisions were to wait",
    )


def _name_measures(about: Metric) -> str:
    direction = f" ({about.direction})" if about.direction else ""
    return LOSS if about.is_loss else f"{about.metric}{direction} and {LOSS}"


def _draw_curves(canvas: Canvas, rows: Rows) -> None:
    measures = rows.by("measure")
    panels = [
        *(name for name in measures if name not in (*_PANELS, _ROLLBACK)),
        *(name for name in _PANELS if name in measures),
    ]
    column = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(column, panels, strict=True):
        for data, part in measures[name].by("data").items():
            axes.plot(part.numbers("decision"), part.numbers("value"), color=_DATA[data], label=data)
        for decision in measures[_ROLLBACK].numbers("decision") if _ROLLBACK in measures else []:
            axes.axvline(decision, color=VERMILION, linewidth=0.8, linestyle=":", label=_ROLLBACK)
        axes.set_ylabel(_PANELS.get(name, name))
        if name == ADDED:
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="y", nbins=4)
    count_along(column[-1], "decision")
    legend_above(canvas)
    canvas.align_ylabels()


def _draw_stages(canvas: Canvas, rows: Rows) -> None:
    canvas.set_figheight(_LANES_MARGIN + LANE_HEIGHT * len(rows.by("slot_name")))
    axes = canvas.subplots()
    seen = draw_lanes(axes, rows)
    count_along(axes, "decision")
    explain_stages(canvas, axes, seen)


def _draw_contributions(canvas: Canvas, rows: Rows) -> None:
    dots = {"marker": ".", "markersize": 2.5}
    axes = draw_lines(canvas, rows.by("slot_name"), "decision", "contribution", "contribution", **dots)
    axes.axhline(0, color=GREY, linewidth=0.6, zorder=1)
