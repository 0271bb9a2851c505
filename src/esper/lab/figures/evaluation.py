"""What evaluations and comparisons show: who scores how much, how surely and at what cost, and what the policy did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from esper.control.learned import POLICY
from esper.dash.formats import MEGA, count, percent, score, signed_score
from esper.lab.analysis import Interval
from esper.lab.behaviour import Behaviour, EpisodeTimeline, Usage, summarise_blueprints, summarise_pairs
from esper.lab.comparison import Comparison
from esper.lab.experiment import ARMS
from esper.lab.figures.drawing import (
    BLUE,
    GREY,
    LABEL_SIZE,
    MARKERS,
    ROW_HEIGHT,
    SOFT,
    count_along,
    legend_above,
    name_rows,
)
from esper.lab.figures.exhibit import Column, Exhibit, Figure, Files, Row, Rows, Table, Value
from esper.lab.figures.lanes import LANE_HEIGHT, draw_lanes, explain_stages
from esper.lab.standings import SPLIT_TITLES, describe_basis, standings_columns, standings_rows
from esper.lifecycle.stages import Stage
from esper.tasks.suite import Split

_SCORES_MARGIN = 0.6
"""Inches of a figure of rows that are not rows."""
_EPISODES_ACROSS = 2
"""Episodes beside each other."""
_ACCURACY_HEIGHT, _PANEL_MARGIN, _EPISODES_MARGIN = 0.5, 0.75, 0.5
"""Inches: of an episode's accuracy, of the titles of its panel, and of the figure's legend."""
_NOBODY = "nobody has played"
_TRIALS = Files(
    f"CONFIGURATION/seed-N/{ARMS}/ARM.json in the comparison's folder ({POLICY}.json of a configuration itself), and "
    f"CONFIGURATION/{ARMS}/ARM.json of arms without training seeds, the list value.outcomes: score, test_accuracy, "
    "added_parameters / host_parameters and flops, averaged over training seeds and instances; intervals are over "
    "both.\n"
)


# Who scores how much --------------------------------------------------------------------------------------------------


def exhibit_evaluation(comparisons: Mapping[Split, Comparison]) -> dict[Split, dict[str, Exhibit]]:
    """An evaluated policy and the other controllers on each split that was played, in one run or in several."""
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
        about = f"all controllers on the same {comparison.instances} {SPLIT_TITLES[split]}"
        exhibits[split] = exhibit_comparison(f"evaluation_{split}", about, source, comparison)
    return exhibits


def exhibit_configurations(comparison: Comparison) -> dict[str, Exhibit]:
    """The first configuration against the others."""
    about = f"all configurations, {comparison.seeds} training seeds each, on the same {comparison.instances} held-out"
    return exhibit_comparison("configurations", f"{about} instances", _TRIALS, comparison)


def exhibit_arms(comparison: Comparison, configuration: str) -> dict[str, Exhibit]:
    """Policies of a configuration among all arms."""
    about = (
        f"the policies of {configuration} ({comparison.seeds} training seeds) and all other arms on the same "
        f"{comparison.instances} held-out instances"
    )
    return exhibit_comparison("arms", about, _TRIALS, comparison)


def exhibit_comparison(name: str, about: str, source: Files, comparison: Comparison) -> dict[str, Exhibit]:
    """All figures and tables; ``about`` says who played what, ``source`` where that is known from."""
    rows, names = standings_rows(comparison), [one.name for one in comparison.standings]
    scores = Figure(
        f"{name}_scores",
        f"Mean score of {about}, with 95% intervals. Score is test accuracy minus the rent on added parameters.",
        source,
        _draw_scores,
        _NOBODY,
        _SCORES_MARGIN + ROW_HEIGHT * len(rows),
    )

    has_flops = any(one.flops is not None for one in comparison.standings)
    costs = Figure(
        f"{name}_costs",
        f"Mean test accuracy of {about} against mean parameters added, as a share of the host's"
        f"{', and against the mean FLOPs of training one network' if has_flops else ''}, with 95% intervals. "
        "Up and to the left is better.",
        source,
        _draw_costs,
        _NOBODY,
        2.6,
        columns=2 if has_flops else 1,
    )

    def mark_best(name: str) -> Callable[[Row], str]:
        return lambda row: "best" if row[name] == max(float(str(row[one])) for one in names) else ""

    families = Table(
        f"{name}_families",
        f"Mean score of {about}, by family of instances; the best of each family is set in bold.",
        source,
        (Column("family"), *(Column(one, score, one, mark=mark_best(one)) for one in names)),
        _NOBODY,
        upright=True,
    )
    family_rows = [
        {"family": family, **{one: means[one] for one in names}} for family, means in comparison.family_scores.items()
    ]

    exhibits = {
        "scores": Exhibit(scores, rows),
        "costs": Exhibit(costs, rows),
        "standings": Exhibit(_tabulate_standings(name, about, source, comparison), rows),
        "families": Exhibit(families, Rows.of(family_rows)),
    }
    if comparison.seeds == 1:
        return exhibits

    runs = [f"run {number}" for number in range(1, comparison.seeds + 1)]
    seeds = Table(
        f"{name}_seeds",
        f"Mean score of {about}, by run, in the order in which they are given.",
        source,
        (Column("name", title=""), *(Column(run, score) for run in runs)),
        _NOBODY,
    )
    seed_rows = [(one.name, *one.by_seed) for one in comparison.standings if len(one.by_seed) == len(runs)]
    return {**exhibits, "seeds": Exhibit(seeds, Rows(("name", *runs), tuple(seed_rows)))}


def _tabulate_standings(name: str, about: str, source: Files, comparison: Comparison) -> Table:
    columns, reference = standings_columns(comparison), comparison.reference.name
    shown = {column.name for column in columns}
    sentences = [
        f"{about[:1].upper()}{about[1:]}.",
        "Means with 95% intervals in brackets. Score is test accuracy minus the rent on added parameters; middle half: "
        "interquartile mean of the score; added are parameters over the host's.",
        f"Better: how often {reference} scores higher on an instance, ties counting half; it describes, and judges "
        "nothing.",
        *(["MFLOP is what training one network took, without measurements."] if "flops" in shown else []),
        *(["Environment steps are what finding it took."] if "environment_steps" in shown else []),
        f"Ahead: mean score of {reference} less that of the other. p: seeds and instances crossed, both at random.",
        describe_basis(comparison),
    ]
    return Table(name, " ".join(sentences), source, columns, _NOBODY)


def _draw_scores(canvas: Canvas, rows: Rows) -> None:
    axes, values, places = canvas.subplots(), rows.numbers("score"), range(len(rows))
    shades = [BLUE if kind == "policy" else GREY for kind in rows.texts("kind")]
    axes.hlines(places, rows.numbers("score_low"), rows.numbers("score_high"), color=shades, linewidth=1.6)
    axes.scatter(values, places, color=shades, s=14, zorder=3)
    name_rows(axes, rows.texts("name"))
    for place, value, shade in zip(places, values, shades, strict=True):
        axes.annotate(
            score(value), (1.02, place), xycoords=axes.get_yaxis_transform(), va="center", color=shade, fontsize=6.5
        )
    axes.set_xlabel("score")


def _draw_costs(canvas: Canvas, rows: Rows) -> None:
    """Test accuracy against what it costs, a panel for each cost that is known."""
    costs = {"added": (1, "parameters added / host's"), "flops": (MEGA, "training MFLOP")}
    measured = [name for name in costs if not all(map(math.isnan, rows.numbers(name)))]
    panels = canvas.subplots(1, len(measured), sharey=True, squeeze=False)[0]
    for axes, cost in zip(panels, measured, strict=True):
        unit, title = costs[cost]
        points = zip(rows.texts("name"), _whiskers(rows, cost, unit), _whiskers(rows, "accuracy"), strict=True)
        for index, (name, (x, left, right), (y, down, up)) in enumerate(points):
            bars = axes.errorbar(
                [x], [y], xerr=[[left], [right]], yerr=[[down], [up]], elinewidth=0.8, color=f"C{index}", label=name
            )
            bars.lines[0].set(marker=MARKERS[index % len(MARKERS)], linestyle="none")
        axes.set_xlabel(title)
    panels[0].set_ylabel("test accuracy")
    legend_above(canvas, 3 * len(measured))


def _whiskers(rows: Rows, name: str, unit: float = 1) -> list[tuple[float, float, float]]:
    """Values, and how far their intervals reach below and above."""
    bounds = zip(*(rows.numbers(f"{name}{end}") for end in ("", "_low", "_high")), strict=True)
    return [(value / unit, max(value - low, 0) / unit, max(high - value, 0) / unit) for value, low, high in bounds]


# What the policy did --------------------------------------------------------------------------------------------------


def exhibit_behaviour(behaviour: Behaviour) -> dict[str, Exhibit]:
    """All that is known of it, by what it is about; what has no rows has nothing to show."""
    usage, sites, episodes = behaviour.usage, behaviour.sites, behaviour.earnings or ()
    usage_file, earnings_file, episodes_file = (
        Files(f"behaviour.json in the run's directory, the list {key}.\n") for key in ("usage", "earnings", "episodes")
    )

    # By family: operations, and blueprints kept out of those germinated.
    family = Column("family", note=lambda row: "(new)" if row["split"] == "transfer" else "")
    used = [name for name in usage[0].operations if any(one.operations[name] for one in usage)]
    operations = Table(
        "behaviour_operations",
        "Share of the policy's decisions per operation, by family.",
        usage_file,
        (family, *(Column(name, percent, name, heated=1.0) for name in used)),
        "the policy decided nothing",
        upright=True,
    )
    operation_rows: list[Row] = [
        {"family": one.family, "split": one.split, **{name: one.operations[name] for name in used}} for one in usage
    ]
    blueprint_rows = [_count_seeds(one, behaviour.blueprints) for one in usage]
    most = max((float(row[name] or 0) for row in blueprint_rows for name in behaviour.blueprints), default=0.0)

    def note_germinated(name: str) -> Callable[[Row], str]:
        return lambda row: "" if row[name] is None else f"of {row[f'{name}_germinated']:.2f}"

    blueprints = Table(
        "behaviour_blueprints",
        "Seeds kept per episode, by blueprint and family; beside it, how many were germinated.",
        usage_file,
        (
            family,
            *(
                Column(name, "{:.2f}".format, name, note=note_germinated(name), heated=most)
                for name in behaviour.blueprints
            ),
        ),
        "there are no blueprints",
        upright=True,
    )

    # What kept seeds earned: Shapley values by blueprint, interactions by pair of slots.
    earnings = Table(
        "earnings",
        "Seeds kept, and in what share of the episodes; their Shapley value, in accuracy on validation data at the end "
        "of the episode: a seed's fair share of what all kept seeds of its network add to the host. Mean over episodes "
        "with its 95% interval, and how many of the seeds have a negative one.",
        earnings_file,
        (
            Column("blueprint"),
            Column("kept", count, note=lambda row: f"in {percent(float(row['episodes'] or 0))}"),
            _mean_column("earned by a seed"),
            Column("negative", percent, "below 0"),
        ),
        "the policy kept no seed",
    )
    earning_rows: list[Row] = [
        {
            "blueprint": one.blueprint,
            "kept": one.kept,
            "episodes": one.episodes / len(episodes),
            **_write_mean(one.value, one.interval),
            "negative": one.negative,
        }
        for one in summarise_blueprints(episodes)
    ]
    interactions = Table(
        "interactions",
        "Accuracy that the seeds of two slots add together beyond what each adds alone, where both were kept: above "
        "zero they help each other, below zero one makes the other superfluous.",
        earnings_file,
        (Column("slots"), Column("episodes", count), _mean_column("interaction")),
        "no network kept seeds in two slots",
    )
    interaction_rows: list[Row] = [
        {
            "slots": f"{sites[one.first]}, {sites[one.second]}",
            "episodes": one.episodes,
            **_write_mean(one.interaction, one.interval),
        }
        for one in summarise_pairs(episodes)
    ]

    # Whole episodes.
    panel = _PANEL_MARGIN + _ACCURACY_HEIGHT + LANE_HEIGHT * len(sites)
    timelines = Figure(
        "episodes",
        "The policy's first held-out episode of each family: validation accuracy above, below it one lane per slot "
        "over the episode's decisions. A label names the blueprint that germinated there; seeds that are not "
        "fossilized at the end are dropped.",
        episodes_file,
        _draw_episodes,
        "no episode was played",
        _EPISODES_MARGIN + panel * -(-len(behaviour.episodes) // _EPISODES_ACROSS),
        columns=2,
    )
    decision_rows = [row for episode in behaviour.episodes for row in _list_decisions(episode, sites)]
    return {
        "operations": Exhibit(operations, Rows.of(operation_rows)),
        "blueprints": Exhibit(blueprints, Rows.of(blueprint_rows)),
        "earnings": Exhibit(earnings, Rows.of(earning_rows)),
        "interactions": Exhibit(interactions, Rows.of(interaction_rows)),
        "episodes": Exhibit(timelines, Rows.of(decision_rows)),
    }


def _count_seeds(usage: Usage, blueprints: Sequence[str]) -> Row:
    """Seeds of each blueprint that were kept in a family, per episode; None of those that never germinated."""
    row: dict[str, Value] = {"family": usage.family, "split": usage.split}
    for name in blueprints:
        plants = [plant for plant in usage.plants if plant.blueprint == name]
        germinated = sum(plant.germinated for plant in plants)
        row |= {name: sum(plant.kept for plant in plants) if germinated else None, f"{name}_germinated": germinated}
    return row


def _write_mean(value: float, interval: Interval | None) -> Row:
    return {"value": value, "value_low": interval and interval.low, "value_high": interval and interval.high}


def _mean_column(title: str) -> Column:
    """With its interval, marked where it is surely on one side of zero."""

    def mark_side(row: Row) -> str:
        low, high = row["value_low"], row["value_high"]
        if not (isinstance(low, float) and isinstance(high, float)):
            return ""
        return "above" if low > 0 else "below" if high < 0 else ""

    return Column("value", signed_score, title, bounded=True, note=lambda _: "too few to say", mark=mark_side)


def _list_decisions(episode: EpisodeTimeline, sites: Sequence[str]) -> Iterator[Row]:
    """A row per decision and slot; a change of stage counts from the decision that made it."""
    new = ", new family" if episode.split == "transfer" else ""
    note = f"score {score(episode.score)}, parameters +{percent(episode.growth)}{new}"
    for slot, site in enumerate(sites):
        stage, blueprint = Stage.DORMANT.name.lower(), None
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


def _draw_episodes(canvas: Canvas, rows: Rows) -> None:
    episodes = list(rows.by("title").values())
    panels = canvas.subfigures(-(-len(episodes) // _EPISODES_ACROSS), _EPISODES_ACROSS, squeeze=False).flat
    seen: set[Stage] = set()
    lanes: list[Axes] = []
    for panel, part in zip(panels, episodes, strict=False):
        slots = part.by("slot_name")
        heights = [_ACCURACY_HEIGHT, LANE_HEIGHT * len(slots)]
        above, below = panel.subplots(2, 1, sharex=True, height_ratios=heights)
        above.set_title(part.texts("title")[0], fontweight="bold")
        above.set_title(part.texts("note")[0], loc="right", color=SOFT, fontsize=LABEL_SIZE)
        first = next(iter(slots.values()))
        above.plot(first.numbers("decision"), first.numbers("accuracy"), color=BLUE)
        above.set_ylim(0, 1)
        if isinstance(drift := first.column("drift")[0], int):
            above.axvline(drift + 0.5, color=GREY, linewidth=0.6)
            above.text(drift + 0.6, 0.05, "data drift", color=SOFT, fontsize=LABEL_SIZE)
        seen |= draw_lanes(below, part)
        count_along(below, "decision")
        lanes.append(below)
    explain_stages(canvas, lanes[0], seen)
