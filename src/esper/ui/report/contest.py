"""The page of a comparison of configurations."""

from __future__ import annotations

from pathlib import Path

from esper.experiments.compared_runs import FinishedComparison
from esper.experiments.comparison import Comparison
from esper.ui.figures.contest import ALL_ARMS, CONFIGURATIONS
from esper.ui.formats import listed
from esper.ui.report.arms import arms_sections
from esper.ui.report.document import document
from esper.ui.report.layout import section
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.standings import standings_figure
from esper.ui.standings import basis, verdict_words


def contest_html(folder: Path, found: FinishedComparison) -> str:
    """The whole page."""
    configurations = found.configurations
    names = [one.name for one in configurations.standings]
    facts = (
        f"Comparison {folder}: {listed(names)}, {configurations.seeds} training seeds each, on the same "
        f"{configurations.instances} held-out instances."
    )
    parts: list[Node] = [
        element("h1", "Which configuration is better?"),
        element("p", facts, class_="facts"),
        *_answer(configurations),
        section("Configurations", standings_figure(configurations, CONFIGURATIONS)),
    ]
    if found.arms is not None:
        parts += arms_sections(found.arms, ALL_ARMS)
    return document(f"Esper: {folder.resolve().name}", *parts)


def _answer(found: Comparison) -> list[Element]:
    first = found.reference.name
    verdicts = [f"{first} against {one.name}: {verdict_words(found, one)}." for one, _ in found.others]
    if not verdicts:
        return []
    return [element("div", *(element("strong", one) for one in verdicts), element("p", basis(found)), class_="answer")]
