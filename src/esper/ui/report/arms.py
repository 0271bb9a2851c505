"""The report of a policy and all arms: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from esper.experiments.arms.standings import Standing
from esper.experiments.statistics import Interval
from esper.files import write_atomically
from esper.ui.arms import ABOUT, verdict_kind
from esper.ui.figures.contest import ALL_ARMS
from esper.ui.figures.record import Source
from esper.ui.formats import MEGA, interval, mega, p_value, percent, score, signed, signed_interval
from esper.ui.report.document import document
from esper.ui.report.layout import figure, section, table
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.scatter import Mark, accuracy_against_growth, scatter

NAME_ROOM = 136
_PARAMETERS = "Mean test accuracy against mean parameters added, as a share of the host's."
_FLOPS = "Mean test accuracy against the mean FLOPs of training one network."
_CAPTION = "Up and to the left is better. Bars are 95% intervals over training seeds and instances."


def write_arms_report(path: Path, standings: Sequence[Standing], *, seeds: int, instances: int) -> None:
    """Write the page; RunError if that fails."""
    write_atomically(path, arms_html(standings, seeds=seeds, instances=instances))


def arms_html(standings: Sequence[Standing], *, seeds: int, instances: int) -> str:
    """The whole page; the policy is the standing that is compared with nobody."""
    return document(
        "Esper: a policy and all arms",
        element("h1", "Does looking pay?"),
        element(
            "p",
            f"The policies of {seeds} training seeds and every other arm on the same {instances} held-out instances.",
            class_="facts",
        ),
        *arms_sections(standings, ALL_ARMS),
    )


def arms_sections(standings: Sequence[Standing], source: Source) -> list[Element]:
    """What there is to say of the arms; ``source`` is where it is known from."""
    costs = [
        figure(_by_parameters(standings), f"{_PARAMETERS} {_CAPTION}", source=source),
        figure(_by_flops(standings), f"{_FLOPS} {_CAPTION}", source=source),
    ]
    return [
        section("Who is better", figure(_numbers(standings), _NUMBERS_CAPTION, source=source)),
        section("What it costs", element("div", *costs, class_="pair")),
        section("Who is who", table(["arm", "what it is"], [_about(one) for one in standings])),
    ]


_NUMBERS_CAPTION = (
    "Means with 95% intervals in brackets, over training seeds and instances. Score is test accuracy minus the rent on "
    "added parameters; added are parameters over the host's; MFLOP is what training one network took, without "
    "measurements. Policy better: the share of pairs of seed and instance in which the policy scores higher, ties "
    "counting half. p: t-test with training seeds as units, adjusted for the number of arms (Holm). Environment steps "
    "are what finding the arm took."
)


def _kind(one: Standing) -> str:
    return "policy" if one.against is None else verdict_kind(one.against.verdict)


def _numbers(standings: Sequence[Standing]) -> Element:
    head = ["arm", "score", "test accuracy", "added", "MFLOP", "policy minus it", "policy better", "p", "verdict"]
    return table([*head, "environment steps"], [_row(one) for one in standings], "numbers dense")


def _row(one: Standing) -> list[Node]:
    against = one.against
    compared: list[Node] = ["", "", "", ""]
    if against is not None:
        compared = [
            _cell(signed(against.difference.estimate), signed_interval(against.difference)),
            percent(against.probability_of_improvement),
            p_value(against.p),
            element("b", against.verdict, class_=_kind(one)),
        ]
    return [
        element("th", one.arm, scope="row", class_=_kind(one) if against is None else ""),
        _cell(score(one.score.estimate), interval(one.score)),
        _cell(percent(one.accuracy.estimate), f"{percent(one.accuracy.low)} to {percent(one.accuracy.high)}"),
        _cell(f"+{percent(one.growth.estimate)}", f"{percent(one.growth.low)} to {percent(one.growth.high)}"),
        _cell(mega(one.flops.estimate), f"{mega(one.flops.low)} to {mega(one.flops.high)}"),
        *compared,
        f"{one.environment_steps:,}",
    ]


def _cell(estimate: str, bounds: str) -> Element:
    return element("td", estimate, " ", element("small", f"[{bounds}]"))


def _by_parameters(standings: Sequence[Standing]) -> Element:
    marks = [Mark(one.arm, _kind(one), one.growth, one.accuracy) for one in standings]
    return accuracy_against_growth(marks, NAME_ROOM)


def _by_flops(standings: Sequence[Standing]) -> Element:
    marks = [Mark(one.arm, _kind(one), _in_mega(one.flops), one.accuracy) for one in standings]
    return scatter(marks, "Accuracy against training FLOPs", "training MFLOP", _with_flops, NAME_ROOM)


def _in_mega(found: Interval) -> Interval:
    return replace(found, estimate=found.estimate / MEGA, low=found.low / MEGA, high=found.high / MEGA)


def _with_flops(mark: Mark) -> str:
    return f"{mark.name}: accuracy {percent(mark.y.estimate)}, {mega(mark.x.estimate * MEGA)} MFLOP"


def _about(one: Standing) -> list[Node]:
    return [element("th", one.arm, scope="row"), ABOUT.get(one.arm, "")]
