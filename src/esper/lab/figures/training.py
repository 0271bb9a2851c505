"""How a policy learned: its score against the baselines, whether training was healthy, and what it made of seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas

from esper.dash.formats import count, percent, signed_score
from esper.dash.progress import SMOOTHING
from esper.errors import plural
from esper.lab.figures.drawing import (
    BLUE,
    COLOURS,
    DASHED,
    GREY,
    LABEL_SIZE,
    SOFT,
    VERMILION,
    add_legend,
    draw_levels,
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
    read_texts,
    run_queries,
)
from esper.rl.ppo import KL_STOP
from esper.runs.metric import J_MEANING
from esper.train.iteration import BY_REWARD, LEVELS

_NO_ITERATION = "no iteration is done"


def _draw_learning(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    # One query gives all curves; each kind has its style.
    kinds = group_rows(rows, "kind")
    styles: dict[str, dict[str, Any]] = {
        "J": {"color": GREY, "linewidth": 0.6},
        "smoothed": {"color": VERMILION},
        "probe": {"color": BLUE, "marker": "o"},
    }
    if "reward" in kinds:
        # Where controllers are paid differently, their mean says little: each reward has its own curve.
        del styles["J"], styles["smoothed"]
        colours = cycle(colour for colour in COLOURS if colour != BLUE)  # that of the greedy policy
        for (name, curve), colour in zip(group_rows(kinds["reward"], "name").items(), colours, strict=False):
            numbers = read_numbers(curve, "iteration"), read_numbers(curve, "value")
            axes.plot(*numbers, label=name, color=colour)
    for kind, style in styles.items():
        if curve := kinds.get(kind):
            label = str(curve[0]["name"])
            axes.plot(read_numbers(curve, "iteration"), read_numbers(curve, "value"), label=label, **style)
    if levels := kinds.get("baseline"):
        # The axes have to hold the levels, too.
        baselines = dict(zip(read_texts(levels, "name"), read_numbers(levels, "value"), strict=True))
        axes.update_datalim([(0, value) for value in baselines.values()], updatex=False)
        axes.autoscale_view()
        draw_levels(axes, baselines)
    axes.set_ylabel("score")
    set_integer_axis(axes)
    add_legend(canvas)


LEARNING = Figure(
    "learning",
    f"Score of the greedy policy and of the baselines (dashed) on the same fixed training problems. {J_MEANING} It is "
    "measured while the policy explores, on new problems in every iteration, so it is only roughly comparable with the "
    "dashed levels. If several rewards are used, J is drawn for each, as the mean of "
    f"{SMOOTHING} iterations.",
    Query(f"""\
SELECT 'J' AS kind, 'J' AS name, iteration, value FROM scalars WHERE name = 'objective'
UNION ALL
SELECT 'smoothed', 'J, mean of {SMOOTHING}', iteration,
    AVG(value) OVER (ORDER BY iteration ROWS {SMOOTHING - 1} PRECEDING)
FROM scalars WHERE name = 'objective'
UNION ALL
SELECT 'reward', 'J, paid by ' || SUBSTR(name, {len(BY_REWARD) + 1}), iteration,
    AVG(value) OVER (PARTITION BY name ORDER BY iteration ROWS {SMOOTHING - 1} PRECEDING)
FROM scalars WHERE name LIKE '{BY_REWARD}%'
UNION ALL
SELECT 'probe', 'greedy policy', iteration, value FROM scalars WHERE name = 'probe_score'
UNION ALL
SELECT 'baseline', levels.key, NULL, levels.value
FROM metadata, json_each(metadata.value) AS levels WHERE metadata.key = '{LEVELS}'
    AND EXISTS (SELECT 1 FROM scalars)
ORDER BY kind, name, iteration
"""),
    _draw_learning,
    _NO_ITERATION,
)
BLUEPRINTS = Table(
    "blueprints",
    "Seeds of the training run by blueprint: the shares that were fossilized (kept) and pruned, and the mean "
    "contribution of kept seeds to validation accuracy when they were kept.",
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
)

_SLOT_NAMES = "(SELECT value FROM metadata WHERE key = 'slots')"
PROBE_INTERACTIONS = Table(
    "probe_interactions",
    "Pairs of modules that the greedy policy kept in one network, in the last probe: the score on validation data that "
    "the two add beyond what each adds alone (the Shapley interaction index), averaged over the networks that kept "
    "both. Above zero they help each other; below zero one makes the other redundant. The ten strongest pairs.",
    Query(f"""\
SELECT COALESCE(json_extract({_SLOT_NAMES}, '$[' || first || ']'), first) || ' ' || first_blueprint AS first,
    COALESCE(json_extract({_SLOT_NAMES}, '$[' || second || ']'), second) || ' ' || second_blueprint AS second,
    COUNT(*) AS networks,
    AVG(interaction) AS interaction,
    MIN(interaction) AS least,
    MAX(interaction) AS most
FROM interactions
WHERE iteration = (SELECT MAX(iteration) FROM events WHERE type = 'interactions_measured')
GROUP BY 1, 2 ORDER BY ABS(SUM(interaction)) DESC, 1, 2 LIMIT 10
"""),
    (
        Column("first", title="module"),
        Column("second", title="with"),
        Column("networks", count),
        Column("interaction", signed_score),
        Column("least", signed_score),
        Column("most", signed_score),
    ),
    "no interaction of kept modules was measured",
)


class Gauge(NamedTuple):
    """A small plot of one figure over training."""

    name: str
    series: str
    meaning: str
    levels: tuple[float, ...] = ()
    """Levels drawn as lines to compare with."""


KL = "ppo/kl"
_GAUGES_ACROSS = 3
GAUGES = (
    Gauge("entropy", "ppo/entropy", "1: the policy decides at random\n0: it no longer explores"),
    Gauge("operation's entropy", "ppo/head_entropy/op", "of the choice of\noperation alone"),
    Gauge("KL divergence", KL, "change of the policy per update\ndashed: the update stops early"),
    Gauge("explained variance", "ppo/explained_variance", "1: the value function\npredicts the returns", (0.0,)),
    Gauge("clipped share", "ppo/clip_fraction", "of decisions whose probability\nratio left the clip range"),
    Gauge("gradient norm", "ppo/gradient_norm", "before clipping"),
    Gauge("accuracy", "accuracy", "validation, at the end\nof the episodes"),
    Gauge("growth", "added", "committed parameters\nrelative to the host's"),
    Gauge("waiting", "operations/wait", "share of decisions"),
)
_HEALTH = Query(f"""\
SELECT 'figure' AS kind, name, iteration, value FROM scalars
WHERE name IN ({", ".join(f"'{gauge.series}'" for gauge in GAUGES)})
UNION ALL
SELECT 'anomaly', anomalies.value, iteration, NULL FROM ppo, json_each(ppo.anomalies) AS anomalies
ORDER BY kind DESC, name, iteration
""")


def health_figure(target_kl: float) -> Figure:
    """The figure of training's health, without its caption, which needs the numbers."""
    draw = partial(_draw_health, KL_STOP * target_kl)
    return Figure("health", "", _HEALTH, draw, _NO_ITERATION, height=5, columns=2)


def exhibit_health(store: Path, target_kl: float, rollbacks: Mapping[str, int]) -> Exhibit:
    """Small plots of the figures that show whether training is healthy; raises as `run_queries`.

    ``rollbacks`` counts the governor's rollbacks by their cause.
    """
    # The caption counts what the figure shows, so it is written after the query.
    (figure,) = run_queries(store, [health_figure(target_kl)])
    caption = "Health of the policy's updates, by iteration"
    anomalies = Counter(row["name"] for row in figure.rows if row["kind"] == "anomaly")
    if anomalies:
        counts = [f"{name} ({number})" for name, number in sorted(anomalies.items())]
        caption += f"; ticks at the bottom mark iterations with an anomaly: {', '.join(counts)}. "
    else:
        caption += ". There were no anomalies. "
    if rollbacks:
        kinds = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in sorted(rollbacks.items()))
        times = plural(sum(rollbacks.values()), "time")
        caption += f"The governor rolled back diverged networks {times} ({kinds})."
    else:
        caption += "No network diverged."
    return replace(figure, caption=caption)


def _draw_health(kl_stop: float, canvas: Canvas, rows: Sequence[Row]) -> None:
    kinds = group_rows(rows, "kind")
    # Gauges that this run has no figures of are left out, and their axes stay empty.
    series = group_rows(kinds.get("figure", []), "name")
    anomalies = read_numbers(kinds.get("anomaly", []), "iteration")
    gauges = [gauge for gauge in GAUGES if gauge.series in series]
    grid = list(canvas.subplots(-(-len(GAUGES) // _GAUGES_ACROSS), _GAUGES_ACROSS, sharex=True).flat)
    for axes, gauge in zip(grid, gauges, strict=False):
        for level in (kl_stop,) if gauge.series == KL else gauge.levels:
            axes.axhline(level, color=GREY, linewidth=0.7, linestyle=DASHED)
        curve = series[gauge.series]
        axes.plot(read_numbers(curve, "iteration"), read_numbers(curve, "value"), color=BLUE)
        axes.set_title(gauge.name, fontweight="bold", pad=18)
        axes.text(0, 1.05, gauge.meaning, transform=axes.transAxes, color=SOFT, fontsize=LABEL_SIZE - 0.5)
        axes.locator_params(axis="y", nbins=4)
        set_integer_axis(axes, "")
        for iteration in anomalies:
            # Ticks at the bottom of every gauge: an anomaly concerns the whole update.
            axes.axvline(iteration, ymax=0.08, color=VERMILION, linewidth=1.2)
    for axes in grid[len(gauges) :]:
        axes.set_axis_off()
