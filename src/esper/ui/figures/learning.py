"""How the policy learned: its score, its entropies, its updates, its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from esper.experiments.trainer import LEVELS
from esper.ui.figures.marks import (
    BLUE,
    GREY,
    PAPER,
    VERMILION,
    colour,
    count_iterations,
    dashes,
    few_ticks,
    legend_above,
    levels_beside,
)
from esper.ui.figures.record import Figure, Query
from esper.ui.figures.rows import Rows
from esper.ui.progress import SMOOTHING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NO_ITERATION = "no iteration is done"

LEARNING = Query(f"""\
SELECT 'J' AS kind, 'J' AS name, iteration, value FROM scalars WHERE name = 'objective'
UNION ALL
SELECT 'smoothed', 'J, mean of {SMOOTHING}', iteration,
    AVG(value) OVER (ORDER BY iteration ROWS {SMOOTHING - 1} PRECEDING)
FROM scalars WHERE name = 'objective'
UNION ALL
SELECT 'probe', 'greedy policy', iteration, value FROM scalars WHERE name = 'probe_score'
UNION ALL
SELECT 'baseline', levels.key, NULL, levels.value
FROM metadata, json_each(metadata.value) AS levels WHERE metadata.key = '{LEVELS}'
    AND EXISTS (SELECT 1 FROM scalars)
ORDER BY kind, name, iteration
""")

ENTROPIES = Query("""\
SELECT replace(name, 'ppo/head_entropy/', '') AS head, iteration, value AS entropy
FROM scalars WHERE name GLOB 'ppo/head_entropy/*' AND value IS NOT NULL
    AND name IN (SELECT name FROM scalars WHERE value > 0)
ORDER BY head, iteration
""")

UPDATES = Query("""\
SELECT iteration, kl, clip_fraction, explained_variance FROM ppo ORDER BY iteration
""")

OPERATIONS = Query("""\
SELECT replace(name, 'operations/', '') AS operation, iteration, value AS share
FROM scalars WHERE name GLOB 'operations/*'
    AND name IN (SELECT name FROM scalars WHERE value > 0)
ORDER BY AVG(value) OVER (PARTITION BY name) DESC, operation, iteration
""")


def _draw_learning(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    parts = rows.by("kind")
    styles: dict[str, dict[str, Any]] = {
        "J": {"color": GREY, "linewidth": 0.6},
        "smoothed": {"color": VERMILION},
        "probe": {"color": BLUE, "marker": "o"},
    }
    for kind, style in styles.items():
        if part := parts.get(kind):
            axes.plot(part.numbers("iteration"), part.numbers("value"), label=part.texts("name")[0], **style)
    if levels := parts.get("baseline"):
        found = dict(zip(levels.texts("name"), levels.numbers("value"), strict=True))
        axes.update_datalim([(0, value) for value in found.values()], updatex=False)
        axes.autoscale_view()
        levels_beside(axes, found)
    axes.set_ylabel("score")
    count_iterations(axes)
    legend_above(canvas, axes)


def _draw_entropies(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    for index, (head, part) in enumerate(rows.by("head").items()):
        style: dict[str, Any] = {"color": colour(index), "linestyle": dashes(index), "label": head.replace("_", " ")}
        axes.plot(part.numbers("iteration"), part.numbers("entropy"), **style)
    axes.set_ylabel("entropy / that of chance")
    axes.set_ylim(-0.03, 1.03)
    count_iterations(axes)
    legend_above(canvas, axes)


def _draw_updates(canvas: Canvas, rows: Rows) -> None:
    panels = {
        "kl": "KL divergence\n(nats)",
        "clip_fraction": "clipped share\nof decisions",
        "explained_variance": "explained\nvariance",
    }
    column = canvas.subplots(len(panels), 1, sharex=True)
    for index, (name, title) in enumerate(panels.items()):
        axes = column[index]
        axes.plot(rows.numbers("iteration"), rows.numbers(name), color=colour(index))
        axes.set_ylabel(title)
        few_ticks(axes, 3)
    count_iterations(column[-1])
    canvas.align_ylabels()


def _draw_operations(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    parts = {name.replace("_", " "): part for name, part in rows.by("operation").items()}
    iterations = next(iter(parts.values())).numbers("iteration")
    shares = [part.numbers("share") for part in parts.values()]
    colours = [colour(index) for index in range(len(parts))]
    axes.stackplot(iterations, *shares, labels=list(parts), colors=colours, edgecolor=PAPER, linewidth=0.6)
    axes.set_ylabel("share of decisions")
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    count_iterations(axes)
    legend_above(canvas, axes)


FIGURES = (
    Figure(
        "learning",
        "Score of the greedy policy on fixed training problems, on test data, against what the baselines score on the "
        "very same problems (dashed). J is the score of the policy while it explores, on other problems in every "
        "iteration and on validation data, so it compares with the dashed levels only roughly.",
        LEARNING,
        _draw_learning,
        NO_ITERATION,
    ),
    Figure(
        "entropies",
        "Entropy of each head of the policy that has a choice, over that of a uniform choice among what was legal.",
        ENTROPIES,
        _draw_entropies,
        NO_ITERATION,
    ),
    Figure(
        "updates",
        "Policy updates: how far the policy moved, the share of decisions whose probability left the clip range, "
        "and how well the value function foresees returns.",
        UPDATES,
        _draw_updates,
        NO_ITERATION,
        height=3.0,
    ),
    Figure(
        "operations", "Operations that the policy chose while it explored.", OPERATIONS, _draw_operations, NO_ITERATION
    ),
)
