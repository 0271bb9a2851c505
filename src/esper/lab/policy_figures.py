"""How policies learned, what evaluations and comparisons show of them, and what they did."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from esper.control.learned import POLICY
from esper.dash.formats import MEGA, count, percent, score, signed_score
from esper.dash.progress import SMOOTHING
from esper.errors import plural
from esper.lab.analysis import Comparison
from esper.lab.drawing import (
    BLUE,
    COLOURS,
    DASHED,
    GREY,
    LABEL_SIZE,
    LANE_HEIGHT,
    SOFT,
    VERMILION,
    add_legend,
    draw_lanes,
    draw_levels,
    explain_stages,
    name_rows,
    plot_curve,
    set_integer_axis,
)
from esper.lab.evaluate import Behaviour, EpisodeTimeline, summarise_blueprints, summarise_pairs
from esper.lab.exhibit import Column, Drawing, Exhibit, Files, Query, Row, Table, group_rows, read_numbers, run_queries
from esper.lab.experiment import ARMS
from esper.lab.standings import describe_basis, name_instances, standings_columns, standings_rows
from esper.lifecycle.table import Stage
from esper.rl.ppo import FIGURES, KL_STOP
from esper.runs.reader import J_MEANING, SCORE_MEANING
from esper.tasks.suite import Split
from esper.train.iteration import LEVELS

_NO_ITERATION = "no iteration is done"


def _draw_learning(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes = canvas.subplots()
    kinds = group_rows(rows, "kind")
    styles: dict[str, dict[str, Any]] = {
        "J": {"color": GREY, "linewidth": 0.6},
        "smoothed": {"color": VERMILION},
        "probe": {"color": BLUE, "marker": "o"},
    }
    for kind, style in styles.items():
        if curve := kinds.get(kind):
            label = str(curve[0]["name"])
            plot_curve(axes, curve, "iteration", label=label, **style)
    if levels := kinds.get("baseline"):
        baselines = dict(zip(group_rows(levels, "name"), read_numbers(levels, "value"), strict=True))
        axes.update_datalim([(0, value) for value in baselines.values()], updatex=False)
        axes.autoscale_view()
        draw_levels(axes, baselines)
    axes.set_ylabel("score")
    set_integer_axis(axes)
    add_legend(canvas, 2)


LEARNING = Drawing(
    "learning",
    "Score of the greedy policy by iteration and, dashed, of the policy before training and of the baselines, all on "
    f"the same fixed training problems. {J_MEANING} It is "
    "measured while the policy explores, on new problems in every iteration: only roughly comparable with the dashed "
    "levels.",
    Query(f"""\
SELECT 'J' AS kind, 'J while exploring' AS name, iteration, value FROM scalars WHERE name = 'objective'
UNION ALL
SELECT 'smoothed', 'J while exploring, mean of {SMOOTHING}', iteration,
    AVG(value) OVER (ORDER BY iteration ROWS {SMOOTHING - 1} PRECEDING)
FROM scalars WHERE name = 'objective'
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
    "Pairs of modules that the greedy policy kept in one network, in the last probe: what the two add to the score on "
    "validation data beyond what each adds alone (Shapley interaction index), averaged over networks that kept both. "
    "Above zero they help each other; below zero one makes the other redundant. The ten strongest pairs.",
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


KL, EXPLAINED = "ppo/kl", "ppo/explained_variance"
_GAUGES_ACROSS = 3
_MEANING_WIDTH = 34
GAUGES = (
    ("entropy", "ppo/entropy", ""),
    ("operation's entropy", "ppo/head_entropy/op", ""),
    ("KL divergence", KL, ""),
    ("explained variance", EXPLAINED, ""),
    ("clipped share", "ppo/clip_fraction", ""),
    ("gradient norm", "ppo/gradient_norm", ""),
    ("accuracy", "accuracy", "validation, at the end\nof the episodes"),
    ("growth", "added", "committed parameters\nrelative to the host's"),
    ("waiting", "operations/wait", "share of decisions"),
)
"""Small plots over training: title, series, and meaning where it is not that of the update's figure."""
_HEALTH = Query(f"""\
SELECT 'figure' AS kind, name, iteration, value FROM scalars
WHERE name IN ({", ".join(f"'{series}'" for _, series, _ in GAUGES)})
UNION ALL
SELECT 'anomaly', anomalies.value, iteration, NULL FROM ppo, json_each(ppo.anomalies) AS anomalies
ORDER BY kind DESC, name, iteration
""")


def health_figure(target_kl: float) -> Drawing:
    """Small plots that show whether training is healthy, without their caption, which needs the numbers."""
    draw = partial(_draw_health, KL_STOP * target_kl)
    return Drawing("health", "", _HEALTH, draw, _NO_ITERATION, height=5, columns=2)


def exhibit_health(store: Path, target_kl: float, rollbacks: Mapping[str, int]) -> Exhibit:
    """The health of a run; ``rollbacks`` counts the governor's rollbacks by their cause."""
    (figure,) = run_queries(store, [health_figure(target_kl)])
    caption = (
        "Health of the policy's updates, by iteration; dashed: the KL divergence at which an update ends early, and "
        "the variance that a constant explains (0)"
    )
    if anomalies := Counter(row["name"] for row in figure.rows if row["kind"] == "anomaly"):
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
    # Gauges without figures are left out, and their axes stay empty.
    series = group_rows(kinds.get("figure", []), "name")
    anomalies = read_numbers(kinds.get("anomaly", []), "iteration")
    gauges = [gauge for gauge in GAUGES if gauge[1] in series]
    grid = list(canvas.subplots(-(-len(GAUGES) // _GAUGES_ACROSS), _GAUGES_ACROSS, sharex=True).flat)
    for axes, (title, name, meaning) in zip(grid, gauges, strict=False):
        if name in (KL, EXPLAINED):
            axes.axhline(kl_stop if name == KL else 0.0, color=GREY, linewidth=0.7, linestyle=DASHED)
        plot_curve(axes, series[name], "iteration", color=BLUE)
        axes.set_title(title, fontweight="bold", pad=18)
        meaning = meaning or fill(FIGURES[name.split("/")[1]], _MEANING_WIDTH)
        axes.text(0, 1.05, meaning, transform=axes.transAxes, color=SOFT, fontsize=LABEL_SIZE - 0.5)
        axes.locator_params(axis="y", nbins=4)
        set_integer_axis(axes, "")
        for iteration in anomalies:
            axes.axvline(iteration, ymax=0.08, color=VERMILION, linewidth=1.2)
    for axes in grid[len(gauges) :]:
        axes.set_axis_off()


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_SCORES_MARGIN, _ROW_HEIGHT = 0.6, 0.19
_EPISODES_ACROSS = 2
"""Episodes beside each other."""
_ACCURACY_HEIGHT, _PANEL_MARGIN, _EPISODES_MARGIN = 0.5, 0.75, 0.5
_NOBODY = "there are no results yet"
_TRAININGS = Files(
    f"CONFIGURATION/seed-N/{ARMS}/ARM.json in the comparison's folder ({POLICY}.json of a configuration itself), and "
    f"CONFIGURATION/{ARMS}/ARM.json of arms without training seeds, the list value.outcomes: score, test_accuracy, "
    "added_parameters / host_parameters and flops, averaged over training seeds and instances; intervals are over "
    "both.\n"
)


def exhibit_evaluation(comparisons: Mapping[Split, Comparison]) -> dict[Split, dict[str, Exhibit]]:
    """An evaluated policy and the other controllers, by split, in one run or in several."""
    exhibits: dict[Split, dict[str, Exhibit]] = {}
    for split, comparison in comparisons.items():
        where, over = (
            ("the run's", "; intervals are over instances, drawn within families.")
            if comparison.seeds == 1
            else ("each run's", ", then over the runs; intervals are over runs, each with instances of its own.")
        )
        source = Files(
            f"evaluation.json in {where} directory, the records whose split is {split}: score, test_accuracy and "
            f"added_parameters / host_parameters, averaged over the instances by controller{over}\n"
        )
        players = f"all controllers on the same {name_instances(comparison.instances, split)}"
        exhibits[split] = _exhibit_comparison(f"evaluation_{split}", players, source, comparison)
    return exhibits


def exhibit_arms(comparison: Comparison, configuration: str | None = None) -> dict[str, Exhibit]:
    """The first configuration against the others, or the policies of ``configuration`` among all arms."""
    seeds, instances = plural(comparison.seeds, "training seed"), name_instances(comparison.instances)
    if configuration is None:
        name, who = "configurations", f"all configurations, {seeds} each,"
    else:
        name, who = "arms", f"the policies of {configuration} ({seeds}) and all other arms"
    return _exhibit_comparison(name, f"{who} on the same {instances}", _TRAININGS, comparison)


def _exhibit_comparison(name: str, players: str, source: Files, comparison: Comparison) -> dict[str, Exhibit]:
    """All figures and tables of a comparison; ``players`` is a phrase for their captions: who played what."""
    rows, names = standings_rows(comparison), [arm.name for arm in comparison.standings]
    scores = Drawing(
        f"{name}_scores",
        f"Mean score of {players}, with 95% intervals. {SCORE_MEANING}",
        source,
        _draw_scores,
        _NOBODY,
        height=_SCORES_MARGIN + _ROW_HEIGHT * len(rows),
        rows=rows,
    )

    has_flops = any(arm.flops is not None for arm in comparison.standings)
    costs = Drawing(
        f"{name}_costs",
        f"Mean test accuracy of {players} against mean parameters added, as a share of the host's"
        f"{', and against the mean FLOPs of training one network' if has_flops else ''}, with 95% intervals. "
        "Up and to the left is better.",
        source,
        _draw_costs,
        _NOBODY,
        height=2.6,
        columns=2 if has_flops else 1,
        rows=rows,
    )

    # The caption explains the columns that the table has.
    columns, reference = standings_columns(comparison), comparison.reference.name
    optional = {
        "flops": "MFLOP: cost of training one network, without measurements.",
        "environment_steps": "Environment steps: cost of finding it.",
    }
    sentences = [
        f"{players[:1].upper()}{players[1:]}.",
        f"Means with 95% intervals in brackets. {SCORE_MEANING} Middle half: interquartile mean of the score. Added: "
        "added parameters relative to the host's.",
        f"{reference} wins: share of instances on which {reference} scores higher (ties count half); verdicts do not "
        "use it.",
        *(sentence for column, sentence in optional.items() if column in {shown.name for shown in columns}),
        f"{reference} minus it: mean score of {reference} minus that of the row. p: adjusted p-value of this "
        "difference, with seeds and instances as crossed random effects.",
        describe_basis(comparison),
    ]
    standings = Table(name, " ".join(sentences), source, columns, _NOBODY, rows=rows)

    def mark_best(name: str) -> Callable[[Row], str]:
        return lambda row: "best" if row[name] == max(read_numbers([row], other)[0] for other in names) else ""

    families = Table(
        f"{name}_families",
        f"Mean score of {players}, by family of instances. The best of each family is in bold.",
        source,
        (Column("family"), *(Column(arm, score, arm, mark=mark_best(arm)) for arm in names)),
        _NOBODY,
        upright=True,
        rows=[
            {"family": family, **{arm: means[arm] for arm in names}}
            for family, means in comparison.family_scores.items()
        ],
    )
    exhibits: dict[str, Exhibit] = {"scores": scores, "costs": costs, "standings": standings, "families": families}
    if comparison.seeds > 1:
        runs = [f"run {number}" for number in range(1, comparison.seeds + 1)]
        # Arms without training seeds have no figures by run.
        exhibits["seeds"] = Table(
            f"{name}_seeds",
            f"Mean score of {players}, by run, in the order in which they are given.",
            source,
            (Column("name", title=""), *(Column(run, score) for run in runs)),
            _NOBODY,
            rows=[
                {"name": arm.name, **dict(zip(runs, arm.by_seed, strict=True))}
                for arm in comparison.standings
                if len(arm.by_seed) == len(runs)
            ],
        )
    return exhibits


def _draw_scores(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes, values, places = canvas.subplots(), read_numbers(rows, "score"), range(len(rows))
    shades = [COLOURS[place % len(COLOURS)] for place in places]
    lows, highs = read_numbers(rows, "score_low"), read_numbers(rows, "score_high")
    axes.hlines(places, lows, highs, color=shades, linewidth=1.6)
    axes.scatter(values, places, color=shades, s=14, zorder=3)
    name_rows(axes, [str(row["name"]) for row in rows])
    for place, value in enumerate(values):
        axes.annotate(score(value), (1.02, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize=6.5)
    axes.set_xlabel("score")


def _draw_costs(canvas: Canvas, rows: Sequence[Row]) -> None:
    costs = {"added": (1, "parameters added / host's"), "flops": (MEGA, "training MFLOP")}
    measured = [name for name in costs if not all(map(math.isnan, read_numbers(rows, name)))]
    panels = canvas.subplots(1, len(measured), sharey=True, squeeze=False)[0]

    def read_whiskers(row: Row, name: str, unit: float = 1) -> tuple[float, list[list[float]]]:
        value, low, high = (read_numbers([row], f"{name}{end}")[0] for end in ("", "_low", "_high"))
        return value / unit, [[max(value - low, 0) / unit], [max(high - value, 0) / unit]]

    for axes, cost in zip(panels, measured, strict=True):
        unit, title = costs[cost]
        for index, row in enumerate(rows):
            (x, across), (y, upright) = read_whiskers(row, cost, unit), read_whiskers(row, "accuracy")
            colour, name = COLOURS[index % len(COLOURS)], str(row["name"])
            bars = axes.errorbar([x], [y], xerr=across, yerr=upright, elinewidth=0.8, color=colour, label=name)
            bars.lines[0].set(marker=_MARKERS[index % len(_MARKERS)], linestyle="none")
        axes.set_xlabel(title)
    panels[0].set_ylabel("test accuracy")
    add_legend(canvas, 3)


# What the policy did


def exhibit_behaviour(behaviour: Behaviour, player: str = "the policy") -> dict[str, Exhibit]:
    """Figures and tables of what the policy or another player did, by subject."""
    usage, sites, names, episodes = behaviour.usage, behaviour.sites, behaviour.blueprints, behaviour.earnings or ()
    usage_file, earnings_file, episodes_file = (
        Files(f"behaviour.json in the run's directory, the list {key}.\n") for key in ("usage", "earnings", "episodes")
    )

    family = Column("family", note=lambda row: "(new)" if row["split"] == "transfer" else "")
    used = [name for name in usage[0].operations if any(entry.operations[name] for entry in usage)]
    exhibits: dict[str, Exhibit] = {}
    exhibits["operations"] = Table(
        "behaviour_operations",
        f"Share of the decisions of {player} per operation, by family.",
        usage_file,
        (family, *(Column(name, percent, name, heated=1.0) for name in used)),
        f"{player} made no decisions",
        upright=True,
        rows=[
            {"family": entry.family, "split": entry.split, **{name: entry.operations[name] for name in used}}
            for entry in usage
        ],
    )

    # By family: seeds of each blueprint kept out of those germinated; no number for those that never germinated.
    blueprint_rows: list[dict[str, Any]] = []
    for entry in usage:
        row: dict[str, Any] = {"family": entry.family, "split": entry.split}
        for name in names:
            plants = [plant for plant in entry.plants if plant.blueprint == name]
            germinated = sum(plant.germinated for plant in plants)
            row |= {name: sum(plant.kept for plant in plants) if germinated else None, f"{name}_germinated": germinated}
        blueprint_rows.append(row)
    most = max((row[name] or 0.0 for row in blueprint_rows for name in names), default=0.0)

    def note_germinated(name: str) -> Callable[[Row], str]:
        return lambda row: "" if row[name] is None else f"of {row[f'{name}_germinated']:.2f}"

    exhibits["blueprints"] = Table(
        "behaviour_blueprints",
        "Seeds kept per episode, by blueprint and family, out of those germinated.",
        usage_file,
        (family, *(Column(name, "{:.2f}".format, name, note=note_germinated(name), heated=most) for name in names)),
        "there are no blueprints",
        upright=True,
        rows=blueprint_rows,
    )

    # What kept seeds earned: Shapley values by blueprint, interactions by pair of slots.
    exhibits["earnings"] = Table(
        "earnings",
        "Seeds kept, the share of episodes with such a seed, and the mean Shapley value of a seed with its 95% "
        "interval: its fair share of the validation accuracy that all kept seeds of a network add to the host at the "
        "end of the episode. Below 0: share of seeds with a negative value.",
        earnings_file,
        (
            Column("blueprint"),
            Column("kept", count, note=lambda row: f"in {percent(float(row['episodes'] or 0))}"),
            _mean_column("earned by a seed"),
            Column("negative", percent, "below 0"),
        ),
        f"{player} kept no seed",
        rows=summarise_blueprints(episodes),
    )
    exhibits["interactions"] = Table(
        "interactions",
        "Accuracy that the kept seeds of two slots add together beyond what each adds alone: above zero they help each "
        "other, below zero one makes the other redundant.",
        earnings_file,
        (Column("slots"), Column("episodes", count), _mean_column("interaction")),
        "no network kept seeds in two slots",
        rows=summarise_pairs(episodes, sites),
    )

    panel = _PANEL_MARGIN + _ACCURACY_HEIGHT + LANE_HEIGHT * len(sites)
    exhibits["episodes"] = Drawing(
        "episodes",
        f"The first episode of {player} in each family: validation accuracy, and below it the stages of each slot "
        "by decision. Labels name germinated blueprints. Seeds not fossilized by the end are dropped.",
        episodes_file,
        _draw_episodes,
        "no episode was played",
        height=_EPISODES_MARGIN + panel * -(-len(behaviour.episodes) // _EPISODES_ACROSS),
        columns=2,
        rows=[row for episode in behaviour.episodes for row in _list_decisions(episode, sites)],
    )
    return exhibits


def _mean_column(title: str) -> Column:
    """Means with their intervals, marked where the interval is on one side of zero."""

    def mark_side(row: Row) -> str:
        low, high = read_numbers([row], "value_low")[0], read_numbers([row], "value_high")[0]
        return "above" if low > 0 else "below" if high < 0 else ""

    return Column("value", signed_score, title, bounded=True, note=lambda _: "too few for an interval", mark=mark_side)


def _list_decisions(episode: EpisodeTimeline, sites: Sequence[str]) -> Iterator[Row]:
    new = ", new family" if episode.split == "transfer" else ""
    note = f"score {score(episode.score)}, parameters +{percent(episode.growth)}{new}"
    for slot, site in enumerate(sites):
        stage, blueprint = Stage.DORMANT.name.lower(), None
        # Of several changes in one step, the last one is what the slot was left in.
        changes = {change.step: change for change in episode.changes if change.slot == slot}
        for step, accuracy in enumerate(episode.accuracy):
            if step in changes:
                stage, blueprint = changes[step].after, changes[step].blueprint
            yield {
                "title": f"{episode.family} / {episode.variant}",
                "note": note,
                "drift": episode.drift_step,
                "decision": step + 1,
                "accuracy": accuracy,
                "slot_name": site,
                "stage": stage,
                "blueprint": blueprint,
            }


def _draw_episodes(canvas: Canvas, rows: Sequence[Row]) -> None:
    episodes = list(group_rows(rows, "title").values())
    panels = canvas.subfigures(-(-len(episodes) // _EPISODES_ACROSS), _EPISODES_ACROSS, squeeze=False).flat
    stages: set[Stage] = set()
    lanes: list[Axes] = []
    for panel, episode in zip(panels, episodes, strict=False):
        slots, first = group_rows(episode, "slot_name"), episode[0]
        above, below = panel.subplots(2, 1, sharex=True, height_ratios=[_ACCURACY_HEIGHT, LANE_HEIGHT * len(slots)])
        above.set_title(str(first["title"]), fontweight="bold")
        above.set_title(str(first["note"]), loc="right", color=SOFT, fontsize=LABEL_SIZE)
        decisions = next(iter(slots.values()))  # every slot has the same accuracies
        plot_curve(above, decisions, "decision", "accuracy", color=BLUE)
        above.set_ylim(0, 1)
        if isinstance(drift := first["drift"], int):
            above.axvline(drift + 0.5, color=GREY, linewidth=0.6)
            above.text(drift + 0.6, 0.05, "data drift", color=SOFT, fontsize=LABEL_SIZE)
        stages |= draw_lanes(below, episode)
        set_integer_axis(below, "decision")
        lanes.append(below)
    explain_stages(canvas, lanes[0], stages)
