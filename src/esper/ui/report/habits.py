"""Which operations and blueprints the policy uses on which family."""

from __future__ import annotations

from collections.abc import Sequence

from esper.experiments.behaviour import Behaviour, Usage
from esper.experiments.episode_log import BlueprintGradients
from esper.training.gradients import EXPLODED, VANISHED
from esper.ui.figures.record import Files
from esper.ui.formats import EN_DASH, percent
from esper.ui.report.layout import figure, section, table, upright
from esper.ui.report.markup import Element, Node, element

RARE = 0.1
"""Seeds kept less often per episode are left out of the list of places."""
FULL_HEAT = 0.6
"""Opacity of the strongest cell, so that its figure stays readable."""
_HEALTH = (
    "How the seeds learned, all families together: their gradient over that of host and fossils, as root mean squares "
    f"per parameter (median over seeds), and the share of minibatches in which this was below {VANISHED:g} (vanished) "
    f"or above {EXPLODED:g} (exploded)."
)
_USAGE = Files("behaviour.json in the run's directory, the list usage.\n")
_GRADIENTS = Files("behaviour.json in the run's directory, the list gradients.\n")


def habits_section(behaviour: Behaviour) -> Element:
    """Three tables by family: operations, blueprints, and what is kept where; and one of how the blueprints learned."""
    usage = behaviour.usage
    gradients = [figure(_gradients(behaviour.gradients), _HEALTH, source=_GRADIENTS)] if behaviour.gradients else []
    return section(
        "What it uses where",
        element(
            "div",
            figure(_operations(usage), "Share of the policy's decisions per operation, by family.", source=_USAGE),
            figure(
                _blueprints(usage, behaviour.blueprints),
                "Seeds kept per episode, by blueprint and family; below it, how many were germinated.",
                source=_USAGE,
            ),
            class_="pair",
        ),
        figure(
            _places(usage, behaviour.sites),
            f"What is kept in which slot, in percent of the family's episodes ({percent(RARE)} and more).",
            source=_USAGE,
        ),
        *gradients,
    )


def _name(usage: Usage) -> Element:
    name: list[Node] = [usage.family]
    if usage.split == "transfer":
        name += [" ", element("small", "(new)")]
    return element("th", *name, scope="row")


def _operations(usage: Sequence[Usage]) -> Element:
    used = [name for name in usage[0].operations if any(one.operations[name] for one in usage)]
    rows = [
        [_name(one), *(_heat(one.operations[name], 1.0, percent(one.operations[name])) for name in used)]
        for one in usage
    ]
    return table(["family", *map(upright, used)], rows, "heat")


def _blueprints(usage: Sequence[Usage], blueprints: Sequence[str]) -> Element:
    strongest = max((_kept(one, name) for one in usage for name in blueprints), default=0.0)
    rows = [[_name(one), *(_kept_cell(one, name, strongest) for name in blueprints)] for one in usage]
    return table(["family", *map(upright, blueprints)], rows, "heat")


def _kept_cell(usage: Usage, blueprint: str, strongest: float) -> Element:
    kept, germinated = _kept(usage, blueprint), _germinated(usage, blueprint)
    if not germinated:
        return element("td", EN_DASH)
    return _heat(kept, strongest, f"{kept:.2f}", f"of {germinated:.2f}")


def _kept(usage: Usage, blueprint: str) -> float:
    return sum(plant.kept for plant in usage.plants if plant.blueprint == blueprint)


def _germinated(usage: Usage, blueprint: str) -> float:
    return sum(plant.germinated for plant in usage.plants if plant.blueprint == blueprint)


def _places(usage: Sequence[Usage], sites: Sequence[str]) -> Element:
    rows = [[_name(one), *(_kept_in(one, slot) for slot in range(len(sites)))] for one in usage]
    return table(["family", *sites], rows, "places")


def _kept_in(usage: Usage, slot: int) -> str:
    plants = sorted((plant for plant in usage.plants if plant.slot == slot), key=lambda plant: -plant.kept)
    return ", ".join(f"{plant.blueprint} {percent(plant.kept)}" for plant in plants if plant.kept >= RARE) or EN_DASH


def _gradients(found: Sequence[BlueprintGradients]) -> Element:
    rows = [
        [
            element("th", one.blueprint, scope="row"),
            str(one.seeds),
            EN_DASH if one.ratio is None else f"{one.ratio:.2g}",
            percent(one.vanished),
            percent(one.exploded),
        ]
        for one in found
    ]
    return table(["blueprint", "seeds", "gradient ratio", "vanished", "exploded"], rows, "numbers")


def _heat(value: float, strongest: float, words: str, note: str = "") -> Element:
    """A cell, the stronger coloured the larger its value."""
    share = value / strongest if strongest else 0.0
    small = [element("small", note)] if note else []
    return element("td", words, *small, style=f"--heat:{FULL_HEAT * share:.3f}")
