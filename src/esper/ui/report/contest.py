"""The page of a comparison of configurations."""

from __future__ import annotations

from pathlib import Path

from esper.experiments.compare.finished import Finished
from esper.ui.figures.contest import ALL_ARMS, CONFIGURATIONS
from esper.ui.figures.record import Exhibit, Table
from esper.ui.formats import listed, p_value, percent, signed, signed_interval
from esper.ui.report.arms import arms_sections
from esper.ui.report.document import document
from esper.ui.report.layout import exhibited, figure, section, table
from esper.ui.report.markup import Element, Node, element

_PAIRS = (
    "The first configuration less each other one, mean score with its 95% interval over training seeds and instances; "
    "how likely a policy of the first beats one of the other on an instance; p by permuting the seeds' means, adjusted "
    "for the number of pairs (Holm)."
)


def contest_html(folder: Path, found: Finished, exhibits: list[Exhibit]) -> str:
    """The whole page; ``exhibits`` are the comparison's figures and tables."""
    names, seeds = list(found.outcomes), len(found.seeds)
    facts = (
        f"Comparison {folder}: {listed(names)}, {seeds} training seeds each, on the same "
        f"{len(found.families)} held-out instances."
    )
    numbers = [exhibited(what, rows) for what, rows in exhibits if isinstance(what, Table)][:1]
    parts: list[Node] = [
        element("h1", "Which configuration is better?"),
        element("p", facts, class_="facts"),
        *_answer(found),
        section("Configurations", *numbers, *_pairs(found)),
    ]
    if found.standings:
        parts += arms_sections(found.standings, ALL_ARMS)
    return document(f"Esper: {folder.resolve().name}", *parts)


def _answer(found: Finished) -> list[Element]:
    sentences = [f"{pair.first} against {pair.second}: {pair.words}." for pair in found.pairs]
    return [element("div", *(element("strong", one) for one in sentences), class_="answer")] if sentences else []


def _pairs(found: Finished) -> list[Element]:
    rows: list[list[Node]] = [
        [
            element("th", f"{pair.first} less {pair.second}", scope="row"),
            element("td", signed(pair.difference.estimate), element("small", signed_interval(pair.difference))),
            percent(pair.probability_of_improvement),
            p_value(pair.p),
            pair.words,
        ]
        for pair in found.pairs
    ]
    head = ["configurations", "score", "better", "p", "verdict"]
    return [figure(table(head, rows, "numbers"), _PAIRS, source=CONFIGURATIONS)] if rows else []
