"""What the policy did in its evaluation: which operations and blueprints where, what kept seeds earned, episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from esper.dash.formats import EN_DASH, count, percent, score, short, signed_score
from esper.lab.analysis import Interval
from esper.lab.behaviour import Behaviour, EpisodeTimeline, Usage, summarise_blueprints, summarise_pairs
from esper.lab.figures.drawing import BLUE, GREY, LABEL_SIZE, SOFT, count_along
from esper.lab.figures.exhibit import Column, Exhibit, Figure, Files, Row, Rows, Table
from esper.lab.figures.lanes import LANE_HEIGHT, draw_lanes, explain_stages
from esper.lifecycle.stages import Stage
from esper.population.gradients import EXPLODED, VANISHED

RARE = 0.1
"""Seeds kept less often per episode are left out of the list of places."""
FULL_HEAT = 0.6
"""Opacity of the strongest cell, so that its figure stays readable."""
_ACROSS = 2
"""Episodes beside each other."""
_ACCURACY_HEIGHT, _PANEL_MARGIN, _MARGIN = 0.5, 0.75, 0.5
"""Inches: of an episode's accuracy, of the titles of its panel, and of the figure's legend."""


def exhibit_behaviour(behaviour: Behaviour) -> dict[str, Exhibit]:
    """All that is known of it; what has no rows has nothing to show."""
    return {
        "operations": _exhibit_operations(behaviour.usage),
        "blueprints": _exhibit_blueprints(behaviour.usage, behaviour.blueprints),
        "places": _exhibit_places(behaviour.usage, behaviour.sites),
        "gradients": _exhibit_gradients(behaviour),
        "earnings": _exhibit_earnings(behaviour),
        "interactions": _exhibit_interactions(behaviour),
        "episodes": _exhibit_episodes(behaviour),
    }


def _source(key: str) -> Files:
    return Files(f"behaviour.json in the run's directory, the list {key}.\n")


def _family(one: Usage, values: Row) -> Row:
    return {"family": one.family, "split": one.split, **values}


_FAMILY = Column("family", note=lambda row: "(new)" if row["split"] == "transfer" else "")


def _heat(name: str, strongest: float) -> Callable[[Row], float]:
    """The stronger coloured the larger its value."""

    def heat(row: Row) -> float:
        value = row[name]
        return FULL_HEAT * value / strongest if strongest and isinstance(value, int | float) else 0.0

    return heat


def _exhibit_operations(usage: Sequence[Usage]) -> Exhibit:
    used = [name for name in usage[0].operations if any(one.operations[name] for one in usage)]
    columns = (_FAMILY, *(Column(name, percent, name, heat=_heat(name, 1.0)) for name in used))
    rows = [_family(one, {name: one.operations[name] for name in used}) for one in usage]
    caption = "Share of the policy's decisions per operation, by family."
    empty = "the policy decided nothing"
    table = Table("behaviour_operations", caption, _source("usage"), columns, empty, upright=True)
    return Exhibit(table, Rows.of(rows))


def _exhibit_blueprints(usage: Sequence[Usage], blueprints: Sequence[str]) -> Exhibit:
    def per_episode(one: Usage, name: str) -> Row:
        plants = [plant for plant in one.plants if plant.blueprint == name]
        germinated = sum(plant.germinated for plant in plants)
        return {name: sum(plant.kept for plant in plants) if germinated else None, f"{name}_germinated": germinated}

    def note(name: str) -> Callable[[Row], str]:
        return lambda row: "" if row[name] is None else f"of {row[f'{name}_germinated']:.2f}"

    rows = [
        _family(one, {key: value for name in blueprints for key, value in per_episode(one, name).items()})
        for one in usage
    ]
    strongest = max((float(row[name] or 0) for row in rows for name in blueprints), default=0.0)
    columns = (Column(name, "{:.2f}".format, name, note=note(name), heat=_heat(name, strongest)) for name in blueprints)
    caption = "Seeds kept per episode, by blueprint and family; beside it, how many were germinated."
    empty = "there are no blueprints"
    table = Table("behaviour_blueprints", caption, _source("usage"), (_FAMILY, *columns), empty, upright=True)
    return Exhibit(table, Rows.of(rows))


def _exhibit_places(usage: Sequence[Usage], sites: Sequence[str]) -> Exhibit:
    def list_kept(one: Usage, slot: int) -> str:
        plants = sorted((plant for plant in one.plants if plant.slot == slot), key=lambda plant: -plant.kept)
        often = [f"{plant.blueprint} {percent(plant.kept)}" for plant in plants if plant.kept >= RARE]
        return ", ".join(often) or EN_DASH

    columns = (_FAMILY, *(Column(site, title=site, long=True) for site in sites))
    rows = [_family(one, {site: list_kept(one, slot) for slot, site in enumerate(sites)}) for one in usage]
    caption = f"What is kept in which slot, in percent of the family's episodes ({percent(RARE)} and more)."
    table = Table("behaviour_places", caption, _source("usage"), columns, "there are no slots")
    return Exhibit(table, Rows.of(rows))


def _exhibit_gradients(behaviour: Behaviour) -> Exhibit:
    rows = [asdict(one) for one in behaviour.gradients or ()]
    columns = (
        Column("blueprint"),
        Column("seeds", count),
        Column("ratio", short, "gradient ratio"),
        Column("vanished", percent),
        Column("exploded", percent),
    )
    caption = (
        "How the seeds learned, all families together: their gradient over that of host and fossils, as root mean "
        "squares per parameter (median over seeds), and the share of minibatches in which this was below "
        f"{VANISHED:g} (vanished) or above {EXPLODED:g} (exploded)."
    )
    empty = "no seed's gradients were measured"
    table = Table("behaviour_gradients", caption, _source("gradients"), columns, empty)
    return Exhibit(table, Rows.of(rows))


def _exhibit_earnings(behaviour: Behaviour) -> Exhibit:
    episodes = behaviour.earnings or ()
    rows = [
        {
            "blueprint": one.blueprint,
            "kept": one.kept,
            "episodes": one.episodes / len(episodes),
            **_mean(one.value, one.interval),
            "negative": one.negative,
        }
        for one in summarise_blueprints(episodes)
    ]
    columns = (
        Column("blueprint"),
        Column("kept", count, note=lambda row: f"in {percent(float(row['episodes'] or 0))}"),
        _mean_column("earned by a seed"),
        Column("negative", percent, "below 0"),
    )
    caption = (
        "Seeds kept, and in what share of the episodes; their Shapley value, in accuracy on validation data at the end "
        "of the episode: a seed's fair share of what all kept seeds of its network add to the host. Mean over episodes "
        "with its 95% interval, and how many of the seeds have a negative one."
    )
    table = Table("earnings", caption, _source("earnings"), columns, "the policy kept no seed")
    return Exhibit(table, Rows.of(rows))


def _exhibit_interactions(behaviour: Behaviour) -> Exhibit:
    sites = behaviour.sites
    rows = [
        {
            "slots": f"{sites[one.first]}, {sites[one.second]}",
            "episodes": one.episodes,
            **_mean(one.interaction, one.interval),
        }
        for one in summarise_pairs(behaviour.earnings or ())
    ]
    columns = (Column("slots"), Column("episodes", count), _mean_column("interaction"))
    caption = (
        "Accuracy that the seeds of two slots add together beyond what each adds alone, where both were kept: above "
        "zero they help each other, below zero one makes the other superfluous."
    )
    table = Table("interactions", caption, _source("earnings"), columns, "no network kept seeds in two slots")
    return Exhibit(table, Rows.of(rows))


def _mean(value: float, found: Interval | None) -> Row:
    return {"value": value, "value_low": found and found.low, "value_high": found and found.high}


def _mean_column(title: str) -> Column:
    """With its interval, marked where it is surely on one side of zero."""

    def side(row: Row) -> str:
        low, high = row["value_low"], row["value_high"]
        if not (isinstance(low, float) and isinstance(high, float)):
            return ""
        return "above" if low > 0 else "below" if high < 0 else ""

    return Column("value", signed_score, title, bounded=True, note=lambda _: "too few to say", mark=side)


def _exhibit_episodes(behaviour: Behaviour) -> Exhibit:
    rows = [row for episode in behaviour.episodes for row in _list_decisions(episode, behaviour.sites)]
    caption = (
        "The policy's first held-out episode of each family: validation accuracy above, below it one lane per slot "
        "over the episode's decisions. A label names the blueprint that germinated there; seeds that are not "
        "fossilized at the end are dropped."
    )
    panel = _PANEL_MARGIN + _ACCURACY_HEIGHT + LANE_HEIGHT * len(behaviour.sites)
    height = _MARGIN + panel * -(-len(behaviour.episodes) // _ACROSS)
    empty = "no episode was played"
    figure = Figure("episodes", caption, _source("episodes"), _draw_episodes, empty, height, columns=2)
    return Exhibit(figure, Rows.of(rows))


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
    panels = canvas.subfigures(-(-len(episodes) // _ACROSS), _ACROSS, squeeze=False).flat
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
