"""What the seeds that the policy kept earned, by blueprint and by pairs of slots."""

from __future__ import annotations

from collections.abc import Sequence

from esper.experiments.analysis import Interval
from esper.experiments.behaviour import Behaviour
from esper.experiments.seed_shapley import BlueprintShapley, PairInteraction, summarise_blueprints, summarise_pairs
from esper.ui.figures.record import Files
from esper.ui.formats import percent, signed, signed_interval
from esper.ui.report.layout import figure, section, table
from esper.ui.report.markup import Element, Node, element

_VALUES = (
    "Seeds kept, and in what share of the episodes; their Shapley value, in accuracy on validation data at the end of "
    "the episode: a seed's fair share of what all kept seeds of its network add to the host. Mean over episodes with "
    "its 95% interval, and how many of the seeds have a negative one."
)
_INTERACTIONS = (
    "Accuracy that the seeds of two slots add together beyond what each adds alone, where both were kept: above zero "
    "they help each other, below zero one makes the other superfluous."
)
_SOURCE = Files("behaviour.json in the run's directory, the list earnings.\n")


def earnings_section(behaviour: Behaviour) -> Element | None:
    """Two tables; None if nothing is known."""
    if behaviour.earnings is None:
        return None
    kept, pairs = summarise_blueprints(behaviour.earnings), summarise_pairs(behaviour.earnings)
    if not kept:
        return section("What the kept seeds earned", element("p", "The policy kept no seed.", class_="note"))
    tables: list[Node] = [figure(_earners(kept, len(behaviour.earnings)), _VALUES, source=_SOURCE)]
    if pairs:
        tables.append(figure(_pairs(pairs, behaviour.sites), _INTERACTIONS, source=_SOURCE))
    return section("What the kept seeds earned", element("div", *tables, class_="pair"))


def _earners(found: Sequence[BlueprintShapley], episodes: int) -> Element:
    rows = [
        [
            element("th", one.blueprint, scope="row"),
            element("td", str(one.kept), element("small", f"in {percent(one.episodes / episodes)}")),
            _mean(one.value, one.interval),
            percent(one.negative),
        ]
        for one in found
    ]
    return table(["blueprint", "kept", "earned by a seed", "below 0"], rows, "numbers")


def _pairs(found: Sequence[PairInteraction], sites: Sequence[str]) -> Element:
    rows = [
        [
            element("th", f"{sites[one.first]}, {sites[one.second]}", scope="row"),
            str(one.episodes),
            _mean(one.interaction, one.interval),
        ]
        for one in found
    ]
    return table(["slots", "episodes", "interaction"], rows, "numbers")


def _mean(value: float, interval: Interval | None) -> Node:
    """A mean, coloured where it is surely on one side of zero, with its interval below."""
    if interval is None:
        return element("td", signed(value), element("small", "too few to say"))
    side = "above" if interval.above_zero else "below" if interval.below_zero else ""
    return element("td", element("b", signed(value), class_=side), element("small", signed_interval(interval)))
