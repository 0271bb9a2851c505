"""Figures and tables of one model that grew."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from esper.dash.formats import MINUS, count, difference, measure, percent, signed_percent
from esper.lab.drawing import (
    BLUE,
    COLOURS,
    DASHED,
    GREEN,
    GREY,
    INK,
    LABEL_SIZE,
    LANE_HEIGHT,
    LINE,
    ON_BARS,
    ORANGE,
    SOFT,
    STAGE_STYLES,
    VERMILION,
    WIDTHS,
    add_legend,
    draw_lanes,
    explain_stages,
    name_rows,
    plot_curve,
    set_integer_axis,
)
from esper.lab.exhibit import Column, Drawing, Exhibit, Files, Query, Row, Table, group_rows, read_numbers
from esper.lifecycle.table import OWNING, Stage
from esper.runs.reader import LOSS, METRIC_NAME, RunMetric, RunReader, describe_contributions

ADDED = "added_parameters"
"""The measure of all seeds' parameters."""
PARAMETERS = "parameters"
GROWN, BARE = "grown", "bare host"
MOMENTS = 6
"""Snapshots at most."""
_SLOT_NAME = "COALESCE((SELECT json_extract(value, '$[' || slot || ']') FROM metadata WHERE key = 'slots'), slot)"
_NO_DECISION = "no decision was made"
_PANELS = {LOSS: "loss", ADDED: "added\nparameters"}
_ROLLBACK = "rollback"
_DATA = {"train": ORANGE, "validation": BLUE, "seeds": GREEN}
_DASHES = ("-", "--", "-.", ":")
_LANES_MARGIN = 1.1
"""Inches of the figure of stages that are not slots."""

_HOST, _SEED = (0.0, 0.16), (0.3, 1.0)
"""Left and right sides of the host's layer, and of the seed behind it."""
_HEIGHT = 0.62
"""Height of a box."""
_LEAST = 0.05
"""Share of a box that is filled at least, to show a seed that does not count yet."""
_MARGIN, _ROW = 0.75, 0.42
"""Inches of all that is no slot, and of a slot."""


def grown_exhibits(metadata: Mapping[str, Any]) -> list[Exhibit]:
    """All figures and tables of a run of a `Grower`; their sources are queries."""
    metric = RunMetric.from_metadata(metadata)
    return [
        Drawing(
            "curves",
            f"Learning curves: {_name_measures(metric)} on training and validation data, and "
            "the parameters that seeds add. Vertical lines are rollbacks.",
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
        Drawing(
            "stages",
            "The stage of each slot by decision. Labels name germinated blueprints. If seeds were kept or "
            "pruned when growth ended, the outcome follows the last decision.",
            Query(f"""\
WITH finished AS (
    SELECT slot, after FROM transitions
    WHERE cause = 'finish' AND iteration = (SELECT max(iteration) FROM decisions)
)
SELECT {_SLOT_NAME} AS slot_name, step + 1 AS decision, stage, blueprint, alpha
FROM (
    SELECT slot, step, stage, blueprint, alpha FROM slots
    UNION ALL
    SELECT slot, step + 1, COALESCE(after, stage), CASE WHEN after = 'pruned' THEN NULL ELSE blueprint END,
        CASE WHEN after = 'pruned' THEN 0 ELSE alpha END
    FROM slots LEFT JOIN finished USING (slot)
    WHERE step = (SELECT max(step) FROM slots) AND EXISTS (SELECT * FROM finished)
)
ORDER BY slot, step
"""),
            _draw_stages,
            _NO_DECISION,
        ),
        Drawing(
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
        Drawing(
            "snapshots",
            "The network at several decisions, input at the top. Grey: layers of the host. To the right of each is the "
            "seed in its slot, filled in proportion to its alpha, with its latest contribution. "
            "\N{MULTIPLICATION SIGN}: pruned seeds.",
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
        Table(
            "seeds",
            "The decisions at which each seed entered its stages, and why it was kept or pruned: its contribution with "
            "its standard error if known, its rent, and the minimum contribution for keeping it, rent included; then "
            "the relative increase of the loss without it, its standard error, and the minimum increase. "
            f"{describe_contributions(metadata)}",
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
                Column("error", measure, optional=True),
                Column("price", measure, "rent"),
                Column("threshold", difference, "minimum"),
                Column("loss_gain", percent, "loss without it", optional=True),
                Column("loss_error", percent, "its error", optional=True),
                Column("loss_threshold", percent, "minimum loss without it", optional=True),
            ),
            "no seed has germinated",
        ),
        Table(
            "decisions",
            "Decisions with an operation, a change of stage (finish: at the end of growth) or a new gate verdict, and "
            f"the {_name_measures(metric)} on validation data at that time. A gate states what is allowed; a seed that "
            "passes its gate is still pruned if its contribution or its effect on the loss is below the minimum.",
            Query(f"""\
WITH changed AS (
    SELECT iteration, group_concat({_SLOT_NAME} || ' ' || before || ' to ' || after
        || CASE WHEN cause = 'finish' THEN ' (finish)' ELSE '' END
        || CASE WHEN threshold IS NULL THEN ''
            ELSE printf(': contribution %+.3g, minimum %+.3g', contribution, threshold) END
        || CASE WHEN loss_threshold IS NULL THEN ''
            ELSE printf(', loss %+.2g%% without it, minimum %.2g%%', 100 * loss_gain, 100 * loss_threshold) END,
        '; ') AS changes
    FROM (SELECT * FROM transitions ORDER BY id) GROUP BY iteration
), decided AS (
    SELECT iteration,
        group_concat({_SLOT_NAME} || ' ' || gate || ' ' || CASE WHEN passed THEN 'passed'
            ELSE 'held back: ' || replace(reason, '_', ' ') END, '; ') AS verdicts
    FROM (SELECT * FROM gates ORDER BY id) GROUP BY iteration
)
SELECT iteration AS decision, op, {_SLOT_NAME} AS slot_name, blueprint, changes, verdicts, loss, metric
FROM decisions LEFT JOIN changed USING (iteration) LEFT JOIN decided USING (iteration)
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
            "every decision was to wait",
        ),
        Table(
            "rollbacks",
            "Rollbacks to the last good state, with the validation loss before and after.",
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
            "training never diverged",
        ),
    ]


def compare_with_bare(store: Path, metadata: Mapping[str, Any], bare_store: Path) -> list[Exhibit]:
    """The figure and the table that compare a run of a `Grower` with one of the same host without growth."""
    metric = RunMetric.from_metadata(metadata)
    source = Files(
        f"run.db of both runs: the scalars validation_{metric.metric} and validation_loss by iteration. The table has "
        "the last decision of both; parameters are host_parameters in the metadata and the scalar added_parameters.\n"
    )
    # The same query on both runs.
    curves: dict[str, dict[str, dict[int, float]]] = {}
    sizes: dict[str, dict[int, float]] = {}
    for model, place in ((GROWN, store), (BARE, bare_store)):
        with RunReader.open(place) as reader:
            curves[model] = {name: dict(reader.series(f"validation_{name}")) for name in {metric.metric: 0, LOSS: 0}}
            sizes[model] = dict(reader.series(ADDED))
    rows: list[Row] = [
        {"measure": name, "model": model, "decision": decision, "value": value}
        for model, measures in curves.items()
        for name, values in measures.items()
        for decision, value in values.items()
    ]

    last = min(max(sizes[model], default=0) for model in curves)
    figures = {name: [curves[model][name].get(last, math.nan) for model in curves] for name in curves[GROWN]}
    if isinstance(host := metadata.get("host_parameters"), int):
        figures[PARAMETERS] = [host + sizes[model].get(last, math.nan) for model in curves]
    compared: list[Row] = []
    for name, (grown, bare) in figures.items():
        values = {"grown": grown, "bare": bare, "difference": grown - bare}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        compared.append({"measure": name, "decision": last, **finite})
    which = f"{_name_measures(metric)} on validation data"
    return [
        Drawing(
            "bare",
            f"The grown model and the bare host: {which}.",
            source,
            _draw_bare,
            _NO_DECISION,
            height=2.6,
            columns=1 if metric.is_loss else 2,
            rows=rows if last else (),
        ),
        Table(
            "bare",
            f"The grown model and the bare host after decision {last}: {which}, and the size of the model. The "
            "difference is grown minus bare. It comes from one run of each, so another random seed may change it.",
            source,
            (
                Column("measure", title=""),
                Column("grown", _write_size_or_measure),
                Column("bare", _write_size_or_measure, "bare host"),
                Column("difference", lambda value: f"{'+' if value > 0 else ''}{_write_size_or_measure(value)}"),
            ),
            _NO_DECISION,
            rows=compared if last else (),
        ),
    ]


def _write_size_or_measure(value: float) -> str:
    """Whole numbers, as those of parameters, without decimals."""
    return count(value).replace("-", MINUS) if value == int(value) and abs(value) > 1 else measure(value)


def _draw_bare(canvas: Canvas, rows: Sequence[Row]) -> None:
    measures = group_rows(rows, "measure")
    panels = canvas.subplots(1, len(measures), squeeze=False)[0]
    styles: dict[str, dict[str, Any]] = {GROWN: {"color": BLUE}, BARE: {"color": VERMILION, "linestyle": DASHED}}
    for axes, (name, curves) in zip(panels, measures.items(), strict=True):
        for model, curve in group_rows(curves, "model").items():
            plot_curve(axes, curve, "decision", label=model, **styles[model])
        axes.set_ylabel(name)
        set_integer_axis(axes, "decision")
    add_legend(canvas)


def _name_measures(metric: RunMetric) -> str:
    direction = f" ({metric.direction})" if metric.direction else ""
    return LOSS if metric.is_loss else f"{metric.metric}{direction} and {LOSS}"


def _draw_curves(canvas: Canvas, rows: Sequence[Row]) -> None:
    # A panel per measure: the run's own metric, which may have any name, then the loss and the parameters.
    measures = group_rows(rows, "measure")
    panels = [
        *(name for name in measures if name not in (*_PANELS, _ROLLBACK)),
        *(name for name in _PANELS if name in measures),
    ]
    rollbacks = read_numbers(measures.get(_ROLLBACK, []), "decision")
    column = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(column, panels, strict=True):
        for data, curve in group_rows(measures[name], "data").items():
            plot_curve(axes, curve, "decision", color=_DATA[data], label=data)
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
        style: dict[str, Any] = {"color": f"C{index}", "linestyle": dashes, "marker": ".", "markersize": 2.5}
        plot_curve(axes, curve, "decision", "contribution", label=slot, **style)
    axes.set_ylabel("contribution")
    set_integer_axis(axes, "decision")
    add_legend(canvas)
    axes.axhline(0, color=GREY, linewidth=0.6, zorder=1)


def _draw_snapshots(canvas: Canvas, rows: Sequence[Row]) -> None:
    # A panel per moment, with the host's layers from top to bottom and the seed behind each.
    moments, slots = list(group_rows(rows, "decision").values()), list(group_rows(rows, "slot_name"))
    canvas.set_size_inches(canvas.get_figwidth(), _MARGIN + _ROW * len(slots))
    panels = canvas.subplots(1, len(moments), sharey=True, squeeze=False)[0]
    stages: set[Stage] = set()
    small: dict[str, Any] = {"fontsize": LABEL_SIZE - 0.5, "ha": "center", "va": "center", "clip_on": True}
    filled: dict[str, Any] = {"linewidth": 0, "zorder": 2}
    empty: dict[str, Any] = {"linewidth": 0.6, "fill": False}
    middle = sum(_SEED) / 2
    for axes, moment in zip(panels, moments, strict=True):
        # Figures of the whole network, the same in every row of a moment.
        first = moment[0]
        value, added = measure(read_numbers([first], "value")[0]), signed_percent(read_numbers([first], "added")[0])
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
            axes.add_patch(_make_box(_HOST, top, facecolor=SOFT, **filled))

            # An empty slot: a pale frame, with what was pruned there.
            if stage not in OWNING:
                axes.add_patch(_make_box(_SEED, top, edgecolor=LINE, **empty))
                if row["pruned"] is not None:
                    axes.text(middle, place, f"\N{MULTIPLICATION SIGN} {row['pruned']}", color=VERMILION, **small)
                continue

            stages.add(stage)
            axes.plot([_HOST[1], _SEED[0]], [place, place], color=SOFT, linewidth=0.8, zorder=1)
            alpha, contribution = (read_numbers([row], name)[0] for name in ("alpha", "contribution"))
            axes.add_patch(_make_box(_SEED, top, max(alpha, _LEAST), facecolor=STAGE_STYLES[stage].colour, **filled))
            axes.add_patch(_make_box(_SEED, top, edgecolor=SOFT, **empty))
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


def _make_box(sides: tuple[float, float], top: float, share: float = 1.0, **style: Any) -> Rectangle:
    left, right = sides
    return Rectangle((left, top), share * (right - left), _HEIGHT, **style)
