"""What the policy did in its evaluation: which operations and blueprints where, what kept seeds earned, episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from esper.experiments.analysis import Interval
from esper.experiments.behaviour import Behaviour, EpisodeTimeline, Usage
from esper.experiments.seed_shapley import summarise_blueprints, summarise_pairs
from esper.lifecycle.stages import Stage
from esper.training.gradients import EXPLODED, VANISHED
from esper.ui.figures.marks import BLUE, GREY, LABEL_SIZE, SOFT, count_iterations
from esper.ui.figures.record import Column, Exhibit, Figure, Files, Table
from esper.ui.figures.rows import Row, Rows, Value
from esper.ui.figures.stages import LANE_HEIGHT, draw_lanes, explain_stages
from esper.ui.figures.written import count, share, short, signed_decimals, text
from esper.ui.formats import EN_DASH, percent, score, signed_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

RARE = 0.1
"""Seeds kept less often per episode are left out of the list of places."""
FULL_HEAT = 0.6
"""Opacity of the strongest cell, so that its figure stays readable."""
_USAGE = Files("behaviour.json in the run's directory, the list usage.\n")
_GRADIENTS = Files("behaviour.json in the run's directory, the list gradients.\n")
_EARNINGS = Files("behaviour.json in the run's directory, the list earnings.\n")
_EPISODES = Files("behaviour.json in the run's directory, the list episodes.\n")
_HEALTH = (
    "How the seeds learned, all families together: their gradient over that of host and fossils, as root mean squares "
    f"per parameter (median over seeds), and the share of minibatches in which this was below {VANISHED:g} (vanished) "
    f"or above {EXPLODED:g} (exploded)."
)
_VALUES = (
    "Seeds kept, and in what share of the episodes; their Shapley value, in accuracy on validation data at the end of "
    "the episode: a seed's fair share of what all kept seeds of its network add to the host. Mean over episodes with "
    "its 95% interval, and how many of the seeds have a negative one."
)
_INTERACTIONS = (
    "Accuracy that the seeds of two slots add together beyond what each adds alone, where both were kept: above zero "
    "they help each other, below zero one makes the other superfluous."
)
_TIMELINES = (
    "The policy's first held-out episode of each family: validation accuracy above, below it one lane per slot over "
    "the episode's decisions. A label names the blueprint that germinated there; seeds that are not fossilized at the "
    "end are dropped."
)
_ACROSS = 2
"""Episodes beside each other."""
_ACCURACY_HEIGHT, _PANEL_MARGIN, _MARGIN = 0.5, 0.75, 0.5
"""Inches: of an episode's accuracy, of the titles of its panel, and of the figure's legend."""


@dataclass(frozen=True)
class BehaviourExhibits:
    """What the policy did, in figures and tables; those without rows have nothing to show."""

    operations: Exhibit
    blueprints: Exhibit
    places: Exhibit
    gradients: Exhibit
    earnings: Exhibit
    pairs: Exhibit
    episodes: Exhibit

    def all(self) -> list[Exhibit]:
        """For papers."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


def exhibit_behaviour(behaviour: Behaviour) -> BehaviourExhibits:
    """All that is known of it."""
    usage = behaviour.usage
    return BehaviourExhibits(
        _operations(usage),
        _blueprints(usage, behaviour.blueprints),
        _places(usage, behaviour.sites),
        _gradients(behaviour),
        _earners(behaviour),
        _pairs(behaviour),
        _episodes(behaviour),
    )


_FAMILY = Column(
    "family", "family", text, numeric=False, note=lambda row: "(new)" if row["split"] == "transfer" else ""
)


def _heat(name: str, strongest: float) -> Callable[[Row], float]:
    """The stronger coloured the larger its value."""

    def heat(row: Row) -> float:
        value = row[name]
        return FULL_HEAT * value / strongest if strongest and isinstance(value, int | float) else 0.0

    return heat


def _operations(usage: Sequence[Usage]) -> Exhibit:
    used = [name for name in usage[0].operations if any(one.operations[name] for one in usage)]
    columns = (_FAMILY, *(Column(name, name, share, heat=_heat(name, 1.0)) for name in used))
    rows = [(one.family, one.split, *(one.operations[name] for name in used)) for one in usage]
    caption = "Share of the policy's decisions per operation, by family."
    table = Table("behaviour_operations", caption, _USAGE, columns, "the policy decided nothing", upright=True)
    return table, Rows(("family", "split", *used), tuple(rows))


def _blueprints(usage: Sequence[Usage], blueprints: Sequence[str]) -> Exhibit:
    strongest = max((_kept(one, name) or 0.0 for one in usage for name in blueprints), default=0.0)
    columns = (
        _FAMILY,
        *(
            Column(name, name, _hundredths, note=_germinated_note(name), heat=_heat(name, strongest))
            for name in blueprints
        ),
    )
    rows = [
        (one.family, one.split, *(value for name in blueprints for value in (_kept(one, name), _germinated(one, name))))
        for one in usage
    ]
    caption = "Seeds kept per episode, by blueprint and family; beside it, how many were germinated."
    names = ("family", "split", *(column for name in blueprints for column in (name, f"{name}_germinated")))
    table = Table("behaviour_blueprints", caption, _USAGE, columns, "there are no blueprints", upright=True)
    return table, Rows(names, tuple(rows))


def _kept(usage: Usage, blueprint: str) -> float | None:
    """None of what never germinated."""
    plants = [plant for plant in usage.plants if plant.blueprint == blueprint]
    return sum(plant.kept for plant in plants) if _germinated(usage, blueprint) else None


def _germinated(usage: Usage, blueprint: str) -> float:
    return sum(plant.germinated for plant in usage.plants if plant.blueprint == blueprint)


def _germinated_note(blueprint: str) -> Callable[[Row], str]:
    return lambda row: "" if row[blueprint] is None else f"of {_hundredths(row[f'{blueprint}_germinated'])}"


def _hundredths(value: Value) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else text(value)


def _places(usage: Sequence[Usage], sites: Sequence[str]) -> Exhibit:
    columns = (_FAMILY, *(Column(site, site, text, numeric=False, long=True) for site in sites))
    rows = [(one.family, one.split, *(_kept_in(one, slot) for slot in range(len(sites)))) for one in usage]
    caption = f"What is kept in which slot, in percent of the family's episodes ({percent(RARE)} and more)."
    table = Table("behaviour_places", caption, _USAGE, columns, "there are no slots")
    return table, Rows(("family", "split", *sites), tuple(rows))


def _kept_in(usage: Usage, slot: int) -> str:
    plants = sorted((plant for plant in usage.plants if plant.slot == slot), key=lambda plant: -plant.kept)
    return ", ".join(f"{plant.blueprint} {percent(plant.kept)}" for plant in plants if plant.kept >= RARE) or EN_DASH


def _gradients(behaviour: Behaviour) -> Exhibit:
    rows = [(one.blueprint, one.seeds, one.ratio, one.vanished, one.exploded) for one in behaviour.gradients or ()]
    columns = (
        Column("blueprint", "blueprint", text, numeric=False),
        Column("seeds", "seeds", count),
        Column("ratio", "gradient ratio", short),
        Column("vanished", "vanished", share),
        Column("exploded", "exploded", share),
    )
    table = Table("behaviour_gradients", _HEALTH, _GRADIENTS, columns, "no seed's gradients were measured")
    return table, Rows(("blueprint", "seeds", "ratio", "vanished", "exploded"), tuple(rows))


def _earners(behaviour: Behaviour) -> Exhibit:
    episodes = behaviour.earnings or ()
    rows = [
        (one.blueprint, one.kept, one.episodes / len(episodes), one.value, *_ends(one.interval), one.negative)
        for one in summarise_blueprints(episodes)
    ]
    columns = (
        Column("blueprint", "blueprint", text, numeric=False),
        Column("kept", "kept", count, note=lambda row: f"in {share(row['episodes'])}"),
        Column("value", "earned by a seed", signed_decimals, note=_interval, mark=_side),
        Column("negative", "below 0", share),
    )
    names = ("blueprint", "kept", "episodes", "value", "low", "high", "negative")
    table = Table("earnings", _VALUES, _EARNINGS, columns, "the policy kept no seed")
    return table, Rows(names, tuple(rows))


def _pairs(behaviour: Behaviour) -> Exhibit:
    sites = behaviour.sites
    rows = [
        (f"{sites[one.first]}, {sites[one.second]}", one.episodes, one.interaction, *_ends(one.interval))
        for one in summarise_pairs(behaviour.earnings or ())
    ]
    columns = (
        Column("slots", "slots", text, numeric=False),
        Column("episodes", "episodes", count),
        Column("value", "interaction", signed_decimals, note=_interval, mark=_side),
    )
    table = Table("interactions", _INTERACTIONS, _EARNINGS, columns, "no network kept seeds in two slots")
    return table, Rows(("slots", "episodes", "value", "low", "high"), tuple(rows))


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (interval.low, interval.high)


def _found(row: Row) -> Interval | None:
    value, low, high = row["value"], row["low"], row["high"]
    if not (isinstance(value, float) and isinstance(low, float) and isinstance(high, float)):
        return None
    return Interval(value, low, high)


def _interval(row: Row) -> str:
    found = _found(row)
    return "too few to say" if found is None else signed_interval(found)


def _side(row: Row) -> str:
    """Marked where it is surely on one side of zero."""
    found = _found(row)
    return "" if found is None else "above" if found.above_zero else "below" if found.below_zero else ""


def _episodes(behaviour: Behaviour) -> Exhibit:
    rows = tuple(row for episode in behaviour.episodes for row in _timeline(episode, behaviour.sites))
    names = ("title", "note", "drift", "decision", "accuracy", "slot_name", "stage", "blueprint")
    lines = -(-len(behaviour.episodes) // _ACROSS)
    panel = _PANEL_MARGIN + _ACCURACY_HEIGHT + LANE_HEIGHT * len(behaviour.sites)
    what = "no episode was played"
    figure = Figure("episodes", _TIMELINES, _EPISODES, _draw_episodes, what, _MARGIN + panel * lines, columns=2)
    return figure, Rows(names, rows)


def _timeline(episode: EpisodeTimeline, sites: Sequence[str]) -> Iterator[tuple[Value, ...]]:
    """A row per decision and slot; a change of stage counts from the decision that made it."""
    new = ", new family" if episode.split == "transfer" else ""
    note = f"score {score(episode.score)}, parameters +{percent(episode.growth)}{new}"
    for slot, site in enumerate(sites):
        stage, blueprint = Stage.DORMANT.name.lower(), None
        changes = {change.step: change for change in episode.changes if change.slot == slot}
        for step, accuracy in enumerate(episode.accuracy):
            if step in changes:
                stage, blueprint = changes[step].after, changes[step].blueprint
            yield (
                *(f"{episode.family} / {episode.variant}", note, episode.drift_step, step + 1, accuracy),
                *(site, stage, blueprint),
            )


def _draw_episodes(canvas: Canvas, rows: Rows) -> None:
    episodes = list(rows.by("title").values())
    lines = -(-len(episodes) // _ACROSS)
    panels = canvas.subfigures(lines, _ACROSS, squeeze=False).flat
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
        count_iterations(below, "decision")
        lanes.append(below)
    explain_stages(canvas, lanes[0], seen)
