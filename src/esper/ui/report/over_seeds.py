"""The page of several evaluated runs that differ in their training seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from esper.experiments.comparison import Comparison
from esper.tasks.suite import Split
from esper.ui.figures.evaluation import PLACES, over_seeds_source
from esper.ui.formats import listed, score
from esper.ui.report.document import document
from esper.ui.report.layout import figure, section, table
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.standings import standings_figure
from esper.ui.standings import basis
from esper.ui.verdict import PLACES as NAMES
from esper.ui.verdict import answer


def over_seeds_html(paths: Sequence[Path], comparisons: Mapping[Split, Comparison]) -> str:
    """The whole page."""
    parts: list[Node] = [
        element("h1", "Did this way of training help?"),
        element("p", f"Runs {listed([str(path) for path in paths])}.", class_="facts"),
    ]
    for split, found in comparisons.items():
        reply, source = answer(found, NAMES[split]), over_seeds_source(split)
        said = [element("strong", reply.short), element("p", reply.sentence), element("p", basis(found))]
        by_seed = figure(
            _by_seed(found), "Mean score of each run, in the order in which they are given.", source=source
        )
        title = f"All controllers on {PLACES[split]}"
        parts += [element("div", *said, class_="answer"), section(title, standings_figure(found, source), by_seed)]
    return document("Esper: one way of training", *parts)


def _by_seed(found: Comparison) -> Element:
    rows = [[element("th", one.name, scope="row"), *map(score, one.by_seed)] for one in found.standings]
    return table(["controller", *(f"run {number}" for number in range(1, found.seeds + 1))], rows, "numbers")
