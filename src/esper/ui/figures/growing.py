"""What grew in training: seeds and their fates, what kept ones contribute, what networks became, what was paid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from esper.ui.figures.marks import (
    BLUE,
    GREY,
    ORANGE,
    PAPER,
    colour,
    count_iterations,
    dashes,
    legend_above,
    marker,
    name_rows,
)
from esper.ui.figures.record import Figure, Query
from esper.ui.figures.rows import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_ROW_HEIGHT, _MARGIN = 0.19, 0.75
"""Inches of a figure of rows: of each, and of what are no rows."""
OUTCOMES = {"fossilized": BLUE, "pruned": ORANGE, "unfinished": GREY}
SLOT_NAME = "COALESCE((SELECT json_extract(value, '$[' || slot || ']') FROM metadata WHERE key = 'slots'), slot)"
"""Of the slot that has a number, in SQL."""
LATE = "iteration > (SELECT MAX(iteration) FROM events WHERE type = 'episode_ended') * 3 / 4"
"""The last quarter of the iterations, when the policy knows most."""

SEEDS = Query("""\
SELECT blueprint, outcome, COUNT(*) AS seeds,
    SUM(COUNT(*)) OVER (PARTITION BY blueprint) AS seeds_of_blueprint
FROM seeds GROUP BY blueprint, outcome
ORDER BY seeds_of_blueprint DESC, blueprint, outcome
""")

# SQLite has no quantiles: these are by nearest rank.
CONTRIBUTIONS = Query(f"""\
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
""")

GROWTH = Query(f"""\
SELECT family, added, accuracy FROM episodes
WHERE {LATE}
ORDER BY family, iteration, environment
""")

REWARDS = Query("""\
WITH networks AS (
    SELECT iteration, COUNT(DISTINCT environment) AS count FROM decisions GROUP BY iteration
), paid AS (
    SELECT iteration, term, SUM(value) AS paid FROM rewards GROUP BY iteration, term
)
SELECT terms.term, networks.iteration, COALESCE(paid.paid, 0) / networks.count AS paid_per_episode
FROM networks CROSS JOIN (SELECT DISTINCT term FROM paid WHERE paid != 0) AS terms
    LEFT JOIN paid ON paid.iteration = networks.iteration AND paid.term = terms.term
ORDER BY terms.term, networks.iteration
""")


def _draw_seeds(canvas: Canvas, rows: Rows) -> None:
    blueprints = list(rows.by("blueprint"))
    canvas.set_figheight(_MARGIN + _ROW_HEIGHT * len(blueprints))
    axes = canvas.subplots()
    ends = [0.0] * len(blueprints)
    parts = rows.by("outcome")
    for outcome, shade in OUTCOMES.items():
        if part := parts.get(outcome):
            places = [blueprints.index(name) for name in part.texts("blueprint")]
            counts = part.numbers("seeds")
            starts = [ends[place] for place in places]
            axes.barh(places, counts, left=starts, color=shade, edgecolor=PAPER, linewidth=0.5, label=outcome)
            for place, count in zip(places, counts, strict=True):
                ends[place] += count
    name_rows(axes, blueprints)
    axes.set_xlabel("seeds")
    legend_above(canvas, axes)


def _draw_contributions(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    blueprints = list(rows.by("blueprint"))
    slots = sorted(rows.by("slot_name"))
    axes.axvline(0, color=GREY, linewidth=0.6)
    for index, slot in enumerate(slots):
        part = rows.by("slot_name")[slot]
        shift = 0.7 * ((index + 0.5) / len(slots) - 0.5)
        places = [blueprints.index(name) + shift for name in part.texts("blueprint")]
        shade = colour(index)
        axes.hlines(places, part.numbers("tenth"), part.numbers("nine_tenths"), color=shade, linewidth=0.6)
        axes.hlines(places, part.numbers("quarter"), part.numbers("three_quarters"), color=shade, linewidth=2)
        style: dict[str, Any] = {
            "marker": marker(index),
            "color": shade,
            "edgecolor": PAPER,
            "linewidth": 0.4,
            "s": 14,
            "zorder": 3,
        }
        axes.scatter(part.numbers("median"), places, label=slot, **style)
    name_rows(axes, blueprints)
    axes.set_xlabel("contribution to validation accuracy")
    legend_above(canvas, axes)


def _draw_growth(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    for index, (family, part) in enumerate(rows.by("family").items()):
        style: dict[str, Any] = {"marker": marker(index), "color": colour(index), "s": 9, "alpha": 0.75, "linewidth": 0}
        axes.scatter(part.numbers("added"), part.numbers("accuracy"), label=family, **style)
    axes.set_xlabel("added parameters / host's")
    axes.set_ylabel("validation accuracy")
    legend_above(canvas, axes, 5)


def _draw_rewards(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    axes.axhline(0, color=GREY, linewidth=0.6)
    for index, (term, part) in enumerate(rows.by("term").items()):
        style: dict[str, Any] = {"color": colour(index), "linestyle": dashes(index), "label": term.replace("_", " ")}
        axes.plot(part.numbers("iteration"), part.numbers("paid_per_episode"), **style)
    axes.set_ylabel("paid per episode")
    count_iterations(axes)
    legend_above(canvas, axes)


FIGURES = (
    Figure("seeds", "All seeds of the run, by blueprint and outcome.", SEEDS, _draw_seeds, "no seed has germinated"),
    Figure(
        "contributions",
        "Counterfactual contribution of kept seeds when they were fossilized, by blueprint and slot: accuracy with the "
        "seed less accuracy without it. Median, middle half (thick) and middle four fifths (thin).",
        CONTRIBUTIONS,
        _draw_contributions,
        "no kept seed was measured",
        height=3.0,
    ),
    Figure(
        "growth",
        "What networks became in the last quarter of the iterations: validation accuracy against committed parameters.",
        GROWTH,
        _draw_growth,
        "no episode has ended",
    ),
    Figure(
        "rewards",
        "What a network's episode paid, by term of the reward, the mean over networks.",
        REWARDS,
        _draw_rewards,
        "the run keeps no single decisions (telemetry.steps_every in its config.yaml)",
    ),
)
