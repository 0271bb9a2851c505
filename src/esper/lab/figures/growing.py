"""Figures and tables of what grew in training: seeds and their fates, what they contribute, what networks became."""

from __future__ import annotations

from itertools import cycle

from matplotlib.figure import Figure as Canvas

from esper.dash.formats import count, percent, score, signed_score
from esper.lab.figures.drawing import (
    BLUE,
    GREY,
    MARKERS,
    ORANGE,
    PAPER,
    ROW_HEIGHT,
    legend_above,
    name_rows,
)
from esper.lab.figures.exhibit import Column, Figure, Query, Rows, Table

_MARGIN = 0.75
"""Inches of a figure of rows that are not rows."""
OUTCOMES = {"fossilized": BLUE, "pruned": ORANGE, "unfinished": GREY}
SLOT_NAME = "COALESCE((SELECT json_extract(value, '$[' || slot || ']') FROM metadata WHERE key = 'slots'), slot)"
"""In SQL: the name of the slot that has a number."""
_LATE = "iteration > (SELECT MAX(iteration) FROM events WHERE type = 'episode_ended') * 3 / 4"
"""The last quarter of the iterations, when the policy knows most."""


def _draw_seeds(canvas: Canvas, rows: Rows) -> None:
    blueprints = list(rows.by("blueprint"))
    canvas.set_figheight(_MARGIN + ROW_HEIGHT * len(blueprints))
    axes = canvas.subplots()
    ends = [0.0] * len(blueprints)
    parts = rows.by("outcome")
    for outcome, shade in OUTCOMES.items():
        if part := parts.get(outcome):
            places = [blueprints.index(name) for name in part.texts("blueprint")]
            counts = part.numbers("seeds")
            starts = [ends[place] for place in places]
            axes.barh(places, counts, left=starts, color=shade, edgecolor=PAPER, linewidth=0.5, label=outcome)
            for place, size in zip(places, counts, strict=True):
                ends[place] += size
    name_rows(axes, blueprints)
    axes.set_xlabel("seeds")
    legend_above(canvas)


def _draw_contributions(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    blueprints, slots = list(rows.by("blueprint")), sorted(rows.by("slot_name").items())
    axes.axvline(0, color=GREY, linewidth=0.6)
    for index, (slot, part) in enumerate(slots):
        shift = 0.7 * ((index + 0.5) / len(slots) - 0.5)
        places = [blueprints.index(name) + shift for name in part.texts("blueprint")]
        shade, marker = f"C{index}", MARKERS[index % len(MARKERS)]
        axes.hlines(places, part.numbers("tenth"), part.numbers("nine_tenths"), color=shade, linewidth=0.6)
        axes.hlines(places, part.numbers("quarter"), part.numbers("three_quarters"), color=shade, linewidth=2)
        dots = axes.scatter(part.numbers("median"), places, s=14, color=shade, marker=marker, label=slot, zorder=3)
        dots.set(edgecolor=PAPER, linewidth=0.4)
    name_rows(axes, blueprints)
    axes.set_xlabel("contribution to validation accuracy")
    legend_above(canvas)


def _draw_growth(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    for (family, part), marker in zip(rows.by("family").items(), cycle(MARKERS), strict=False):
        added, accuracy = part.numbers("added"), part.numbers("accuracy")
        axes.scatter(added, accuracy, s=9, marker=marker, alpha=0.75, linewidth=0, label=family)
    axes.set_xlabel("added parameters / host's")
    axes.set_ylabel("validation accuracy")
    legend_above(canvas, 5)


# SQLite has no quantiles: those of contributions are by nearest rank.
GROWING_EXHIBITS: tuple[Figure | Table, ...] = (
    Figure(
        "seeds",
        "All seeds of the run, by blueprint and outcome.",
        Query("""\
SELECT blueprint, outcome, COUNT(*) AS seeds,
    SUM(COUNT(*)) OVER (PARTITION BY blueprint) AS seeds_of_blueprint
FROM seeds GROUP BY blueprint, outcome
ORDER BY seeds_of_blueprint DESC, blueprint, outcome
"""),
        _draw_seeds,
        "no seed has germinated",
    ),
    Figure(
        "contributions",
        "Counterfactual contribution of kept seeds when they were fossilized, by blueprint and slot: accuracy with the "
        "seed less accuracy without it. Median, middle half (thick) and middle four fifths (thin).",
        Query(f"""\
WITH ranked AS (
    SELECT blueprint, slot, contribution,
        ROW_NUMBER() OVER (PARTITION BY blueprint, slot ORDER BY contribution) AS place,
        COUNT(*) OVER (PARTITION BY blueprint, slot) AS count
    FROM seeds WHERE outcome = 'fossilized' AND contribution IS NOT NULL
)
SELECT blueprint,
    {SLOT_NAME} AS slot_name,
    count AS seeds,
    MAX(CASE WHEN place = (count + 9) / 10 THEN contribution END) AS tenth,
    MAX(CASE WHEN place = (count + 3) / 4 THEN contribution END) AS quarter,
    MAX(CASE WHEN place = (count + 1) / 2 THEN contribution END) AS median,
    MAX(CASE WHEN place = (3 * count + 3) / 4 THEN contribution END) AS three_quarters,
    MAX(CASE WHEN place = (9 * count + 9) / 10 THEN contribution END) AS nine_tenths
FROM ranked GROUP BY blueprint, slot
ORDER BY SUM(count) OVER (PARTITION BY blueprint) DESC, blueprint, slot
"""),
        _draw_contributions,
        "no kept seed was measured",
        height=3.0,
    ),
    Figure(
        "growth",
        "What networks became in the last quarter of the iterations: validation accuracy against committed parameters.",
        Query(f"""\
SELECT family, added, accuracy FROM episodes
WHERE {_LATE}
ORDER BY family, iteration, environment
"""),
        _draw_growth,
        "no episode has ended",
    ),
    Table(
        "families",
        "Episodes of the training run by family of problems: means over episodes. J is the score on validation data "
        "while the policy explores (late: in the last quarter of the iterations), added are committed parameters over "
        "the host's, kept are fossils per network.",
        Query(f"""\
SELECT family, COUNT(*) AS episodes,
    AVG(objective) AS objective,
    AVG(CASE WHEN {_LATE} THEN objective END) AS late_objective,
    AVG(accuracy) AS accuracy,
    AVG(added) AS added,
    AVG((SELECT COUNT(*) FROM json_each(kept) WHERE type != 'null')) AS kept
FROM episodes GROUP BY family ORDER BY family
"""),
        (
            Column("family"),
            Column("episodes", count),
            Column("objective", score, "J"),
            Column("late_objective", score, "J, late"),
            Column("accuracy", percent),
            Column("added", percent),
            Column("kept", score),
        ),
        "no episode has ended",
    ),
    Table(
        "blueprints",
        "Seeds of the training run by blueprint: what became of them, and the mean contribution to validation accuracy "
        "of fossilized ones when they were fossilized.",
        Query("""\
SELECT blueprint, COUNT(*) AS seeds,
    AVG(outcome = 'fossilized') AS fossilized,
    AVG(outcome = 'pruned') AS pruned,
    AVG(CASE WHEN outcome = 'fossilized' THEN contribution END) AS contribution
FROM seeds GROUP BY blueprint ORDER BY seeds DESC, blueprint
"""),
        (
            Column("blueprint"),
            Column("seeds", count),
            Column("fossilized", percent),
            Column("pruned", percent),
            Column("contribution", signed_score),
        ),
        "no seed has germinated",
    ),
)
