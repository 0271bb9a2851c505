"""Figures and tables of one model that grew: its learning, its slots, its seeds' lives, its decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from esper.dash.formats import count, difference, measure, percent, signed_percent
from esper.lab.figures.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    INK,
    LABEL_SIZE,
    LINE,
    ORANGE,
    SOFT,
    VERMILION,
    WIDTHS,
    add_legend,
    name_rows,
    set_integer_axis,
)
from esper.lab.figures.exhibit import (
    Column,
    Exhibit,
    Figure,
    Query,
    Row,
    Table,
    group_rows,
    read_numbers,
    run_queries,
)
from esper.lab.figures.lanes import LANE_HEIGHT, ON_BARS, STAGE_STYLES, draw_lanes, explain_stages
from esper.lifecycle.stages import OWNING, Stage
from esper.runs.metric import LOSS, METRIC_NAME, Metric, describe_contributions

ADDED = "added_parameters"
"""The measure of all seeds' parameters."""
MOMENTS = 6
"""Snapshots at most."""
_SLOT_NAME = "COALESCE((SELECT json_extract(value, '$[' || slot || ']') FROM metadata WHERE key = 'slots'), slot)"
"""SQL for the name of the slot with a number."""
_NO_DECISION = "no decision was made"
_PANELS = {LOSS: "loss", ADDED: "added\nparameters"}
_ROLLBACK = "rollback"
_DATA = {"train": ORANGE, "validation": BLUE, "seeds": GREEN}
_DASHES = ("-", "--", "-.", ":")
_LANES_MARGIN = 1.1
"""Inches of the figure of stages that are not slots."""

# Of a snapshot's panel, in which slots are 1 apart.
_HOST, _SEED = (0.0, 0.16), (0.3, 1.0)
"""Left and right sides: of the host's layer, and of the seed behind it."""
_HEIGHT = 0.62
"""Height of a box."""
_LEAST = 0.05
"""Share of a box that is filled at least, to show the stage of a seed that does not count yet."""
_MARGIN, _ROW = 0.75, 0.42
"""Inches: of all that is no slot, and of a slot."""


def grown_exhibits(store: Path, metadata: Mapping[str, Any]) -> list[Exhibit]:
    """All figures and tables of a run of a `Grower`.

    Raises:
        RunError: its store is missing, damaged or not ours.
    """
    return run_queries(store, [*grown_figures(metadata), *grown_tables(metadata)])


def grown_figures(metadata: Mapping[str, Any]) -> list[Figure]:
    """The figures, named after the run's own metric."""
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
SELECT {_SLOT_NAME} AS slot_name, step + 1 AS decision, stage, blueprint, alpha
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
SELECT {_SLOT_NAME} AS slot_name, step + 1 AS decision, contribution
FROM slots
WHERE slot IN (SELECT slot FROM slots WHERE contribution IS NOT NULL)
ORDER BY slot, step
"""),
            _draw_contributions,
            "no contribution was measured",
        ),
        Figure(
            "snapshots",
            "The network at a few moments, its input at the top: the host's layers in grey, behind each the seed that "
            "lives there, filled by the share of its alpha, with its contribution when last measured. Crossed out: "
            "what was pruned there.",
            Query(f"""\
WITH RECURSIVE share(number) AS (
    SELECT 0 UNION ALL SELECT number + 1 FROM share WHERE number < {MOMENTS - 1}
), moments AS (
    SELECT DISTINCT CAST(round(number * (SELECT max(step) FROM slots) / {MOMENTS - 1}.0) AS INTEGER) AS step FROM share
), shown AS (
    SELECT slots.step, slots.slot, stage, slots.blueprint, alpha, contribution,
        COALESCE(decisions.metric, decisions.loss) AS value, added
    FROM moments JOIN slots USING (step) JOIN decisions USING (step)
)
SELECT step + 1 AS decision, {_SLOT_NAME} AS slot_name, stage, blueprint, alpha, contribution,
    (SELECT {METRIC_NAME}) AS measure, value, added,
    (SELECT group_concat(ended.blueprint, ', ') FROM transitions AS ended
        WHERE ended.slot = shown.slot AND ended.after = 'pruned' AND ended.step <= shown.step) AS pruned
FROM shown ORDER BY step, slot
"""),
            _draw_snapshots,
            _NO_DECISION,
            columns=2,
        ),
    ]


def grown_tables(metadata: Mapping[str, Any]) -> list[Table]:
    """The tables, with the run's own metric."""
    metric = Metric.from_metadata(metadata)
    return [
        Table(
            "seeds",
            "The life of each seed, by the decisions with which it entered a stage, and why it was kept or pruned: its "
            "contribution, the standard error where that is known, the rent that it added, and the contribution from "
            "which it is kept, rent included; then how much lower the loss was with it, as a share, the standard "
            f"error, and the share from which it is kept. {describe_contributions(metadata)}",
            Query(f"""\
SELECT {_SLOT_NAME} AS slot_name, blueprint,
    germinated + 1 AS germinated, trained + 1 AS trained, blended + 1 AS blended, held + 1 AS held,
    COALESCE(fossilized, pruned) + 1 AS ended, outcome, cause, contribution, error, price, threshold,
    loss_gain, loss_error, loss_threshold
FROM seeds ORDER BY germinated, slot
"""),
            (
                Column("slot_name", title="slot"),
                Column("blueprint"),
                *(Column(name, count) for name in ("germinated", "blended", "held", "ended")),
                Column("outcome"),
                Column("contribution", difference),
                Column("error", measure),
                Column("price", measure, "rent"),
                Column("threshold", difference, "kept from"),
                Column("loss_gain", percent, "loss lower by"),
                Column("loss_error", percent, "error of the loss"),
                Column("loss_threshold", percent, "loss kept from"),
            ),
            "no seed has germinated",
        ),
        Table(
            "decisions",
            "Every decision with which something happened: what was decided, which slots changed their stage (finish: "
            "when growth ended after it), new verdicts of the gates ahead of seeds, and the "
            f"{_name_measures(metric)} on validation data that it was made on. A gate says what is allowed, the "
            "thresholds what is worth it: a seed whose gate has passed is pruned if its contribution, or its effect on "
            "the loss, is below one.",
            Query(f"""\
WITH changed AS (
    SELECT iteration, group_concat({_SLOT_NAME} || ' ' || before || ' to ' || after
        || CASE WHEN cause = 'finish' THEN ' (finish)' ELSE '' END
        || CASE WHEN threshold IS NULL THEN ''
            ELSE printf(': contribution %+.3g, kept from %+.3g', contribution, threshold) END
        || CASE WHEN loss_threshold IS NULL THEN ''
            ELSE printf(', loss lower by %.2g%%, kept from %.2g%%', 100 * loss_gain, 100 * loss_threshold) END,
        '; ') AS changes
    FROM (SELECT * FROM transitions ORDER BY id) GROUP BY iteration
), judged AS (
    SELECT iteration,
        group_concat({_SLOT_NAME} || ' ' || gate || ' ' || CASE WHEN passed THEN 'passed'
            ELSE 'held back: ' || replace(reason, '_', ' ') END, '; ') AS verdicts
    FROM (SELECT * FROM gates ORDER BY id) GROUP BY iteration
)
SELECT iteration AS decision, op, {_SLOT_NAME} AS slot_name, blueprint, changes, verdicts, loss, metric
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
                *([] if metric.is_loss else [Column("metric", measure, metric.metric)]),
            ),
            "all decisions were to wait",
        ),
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


def _name_measures(metric: Metric) -> str:
    direction = f" ({metric.direction})" if metric.direction else ""
    return LOSS if metric.is_loss else f"{metric.metric}{direction} and {LOSS}"


def _draw_curves(canvas: Canvas, rows: Sequence[Row]) -> None:
    """A panel per measure: the run's own metric above, then the loss and the parameters."""
    measures = group_rows(rows, "measure")
    # The owner's metric has a name of its own, so it is what is left of the known ones.
    panels = [
        *(name for name in measures if name not in (*_PANELS, _ROLLBACK)),
        *(name for name in _PANELS if name in measures),
    ]
    rollbacks = read_numbers(measures.get(_ROLLBACK, []), "decision")
    # One column of panels over the same decisions.
    column = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(column, panels, strict=True):
        for data, curve in group_rows(measures[name], "data").items():
            axes.plot(read_numbers(curve, "decision"), read_numbers(curve, "value"), color=_DATA[data], label=data)
        for decision in rollbacks:
            axes.axvline(decision, color=VERMILION, linewidth=0.8, linestyle=":", label=_ROLLBACK)
        axes.set_ylabel(_PANELS.get(name, name))
        if name == ADDED:
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="y", nbins=4)
    set_integer_axis(column[-1], "decision")
    add_legend(canvas)
    canvas.align_ylabels()


def _draw_stages(canvas: Canvas, rows: Sequence[Row]) -> None:
    canvas.set_figheight(_LANES_MARGIN + LANE_HEIGHT * len(group_rows(rows, "slot_name")))
    axes = canvas.subplots()
    stages = draw_lanes(axes, rows)
    set_integer_axis(axes, "decision")
    explain_stages(canvas, axes, stages)


def _draw_contributions(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    for index, (slot, curve) in enumerate(group_rows(rows, "slot_name").items()):
        # Neighbours differ in their dashes, and so do slots of one colour.
        dashes = _DASHES[(index + index // len(COLOURS)) % len(_DASHES)]
        axes.plot(
            read_numbers(curve, "decision"),
            read_numbers(curve, "contribution"),
            color=f"C{index}",
            linestyle=dashes,
            label=slot,
            marker=".",
            markersize=2.5,
        )
    axes.set_ylabel("contribution")
    set_integer_axis(axes, "decision")
    add_legend(canvas)
    axes.axhline(0, color=GREY, linewidth=0.6, zorder=1)


def _draw_snapshots(canvas: Canvas, rows: Sequence[Row]) -> None:
    """A panel per moment, with the host's layers from top to bottom and the seed behind each."""
    # The query has chosen the moments: evenly spread, the first and the last among them.
    moments, slots = list(group_rows(rows, "decision").values()), list(group_rows(rows, "slot_name"))
    canvas.set_size_inches(canvas.get_figwidth(), _MARGIN + _ROW * len(slots))
    panels = canvas.subplots(1, len(moments), sharey=True, squeeze=False)[0]
    stages: set[Stage] = set()
    small: dict[str, Any] = {"fontsize": LABEL_SIZE - 0.5, "ha": "center", "va": "center", "clip_on": True}
    middle = sum(_SEED) / 2
    for axes, moment in zip(panels, moments, strict=True):
        # Figures of the whole network, which are the same in every row of a moment.
        first = moment[0]
        value, added = measure(_to_number(first["value"])), signed_percent(_to_number(first["added"]))
        axes.set_title(f"decision {first['decision']}", fontsize=LABEL_SIZE + 0.5, loc="center")
        axes.set_xlabel(f"{first['measure']} {value}\n{added} parameters", fontsize=LABEL_SIZE)
        axes.set_xlim(-0.04, 1.04)
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.plot([sum(_HOST) / 2] * 2, [-0.5, len(moment) - 0.5], color=SOFT, linewidth=0.8, zorder=1)
        for place, row in enumerate(moment):
            top, stage = place - _HEIGHT / 2, Stage[str(row["stage"]).upper()]
            axes.add_patch(_make_box(_HOST, top, SOFT))

            # An empty slot: a pale frame, with what was pruned there.
            if stage not in OWNING:
                axes.add_patch(_make_frame(top, LINE))
                if row["pruned"] is not None:
                    axes.text(middle, place, f"\N{MULTIPLICATION SIGN} {row['pruned']}", color=VERMILION, **small)
                continue

            # A seed: a box filled by its alpha, with its blueprint and its contribution.
            stages.add(stage)
            axes.plot([_HOST[1], _SEED[0]], [place, place], color=SOFT, linewidth=0.8, zorder=1)
            alpha, contribution = _to_number(row["alpha"]), _to_number(row["contribution"])
            axes.add_patch(_make_box(_SEED, top, STAGE_STYLES[stage].colour, max(alpha, _LEAST)))
            axes.add_patch(_make_frame(top, SOFT))
            ink = ON_BARS if alpha > 0.5 else INK
            axes.text(middle, place - 0.13, str(row["blueprint"]), color=ink, **small)
            if not math.isnan(contribution):
                axes.text(middle, place + 0.15, difference(contribution), color=ink, **small)
    name_rows(panels[0], slots)
    styles = [style for stage, style in STAGE_STYLES.items() if stage in stages]
    if styles:
        boxes, meanings = [Patch(color=style.colour) for style in styles], [style.meaning for style in styles]
        across = len(styles) if canvas.get_figwidth() > WIDTHS[1] else 2
        canvas.legend(boxes, meanings, loc="outside upper center", ncols=across)


def _make_box(sides: tuple[float, float], top: float, colour: str, share: float = 1.0) -> Rectangle:
    left, right = sides
    return Rectangle((left, top), share * (right - left), _HEIGHT, facecolor=colour, linewidth=0, zorder=2)


def _make_frame(top: float, colour: str) -> Rectangle:
    left, right = _SEED
    return Rectangle((left, top), right - left, _HEIGHT, fill=False, edgecolor=colour, linewidth=0.6)


def _to_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
