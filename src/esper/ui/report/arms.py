"""The report of a policy and all arms: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from esper.experiments.analysis import Interval
from esper.experiments.comparison import Comparison, Standing
from esper.files import write_atomically
from esper.ui.figures.contest import ALL_ARMS
from esper.ui.figures.record import Source
from esper.ui.formats import MEGA, mega, percent
from esper.ui.report.document import document
from esper.ui.report.layout import figure, section, table
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.scatter import Mark, accuracy_against_growth, scatter
from esper.ui.report.standings import standings_figure
from esper.ui.standings import ABOUT, verdict_kind

NAME_ROOM = 136
_PARAMETERS = "Mean test accuracy against mean parameters added, as a share of the host's."
_FLOPS = "Mean test accuracy against the mean FLOPs of training one network."
_CAPTION = "Up and to the left is better. Bars are 95% intervals."


def write_arms_report(path: Path, comparison: Comparison) -> None:
    """Write the page; RunError if that fails."""
    write_atomically(path, arms_html(comparison))


def arms_html(comparison: Comparison) -> str:
    """The whole page."""
    return document(
        "Esper: a policy and all arms",
        element("h1", "Does looking pay?"),
        element(
            "p",
            f"The policies of {comparison.seeds} training seeds and every other arm on the same {comparison.instances} "
            "held-out instances.",
            class_="facts",
        ),
        *arms_sections(comparison, ALL_ARMS),
    )


def arms_sections(comparison: Comparison, source: Source) -> list[Element]:
    """What there is to say of the arms; ``source`` is where it is known from."""
    standings = comparison.standings
    costs = [
        figure(_by_parameters(standings), f"{_PARAMETERS} {_CAPTION}", source=source),
        figure(_by_flops(standings), f"{_FLOPS} {_CAPTION}", source=source),
    ]
    return [
        section("Who is better", standings_figure(comparison, source)),
        section("What it costs", element("div", *costs, class_="pair")),
        section("Who is who", table(["arm", "what it is"], [_about(one) for one in standings])),
    ]


def _by_parameters(standings: Sequence[Standing]) -> Element:
    marks = [Mark(one.name, verdict_kind(one.against), one.growth, one.accuracy) for one in standings]
    return accuracy_against_growth(marks, NAME_ROOM)


def _by_flops(standings: Sequence[Standing]) -> Element:
    spent = [(one, one.flops) for one in standings if one.flops is not None]
    marks = [Mark(one.name, verdict_kind(one.against), _in_mega(flops), one.accuracy) for one, flops in spent]
    return scatter(marks, "Accuracy against training FLOPs", "training MFLOP", _with_flops, NAME_ROOM)


def _in_mega(found: Interval) -> Interval:
    return replace(found, estimate=found.estimate / MEGA, low=found.low / MEGA, high=found.high / MEGA)


def _with_flops(mark: Mark) -> str:
    return f"{mark.name}: accuracy {percent(mark.y.estimate)}, {mega(mark.x.estimate * MEGA)} MFLOP"


def _about(one: Standing) -> list[Node]:
    return [element("th", one.name, scope="row"), ABOUT.get(one.name, "")]
