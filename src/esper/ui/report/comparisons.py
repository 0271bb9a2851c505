"""The pages of comparisons: of configurations, of a policy and all arms, and of runs with several training seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from esper.experiments.comparison import Comparison
from esper.experiments.contest import FinishedContest
from esper.files import write_atomically
from esper.tasks.suite import Split
from esper.ui.figures.contest import exhibit_arms, exhibit_configurations
from esper.ui.figures.standings import PLACES, ComparisonExhibits, exhibit_evaluation, over_seeds_source
from esper.ui.formats import listed
from esper.ui.report.page import Answer, Page, Section
from esper.ui.standings import ABOUT, basis, verdict_words
from esper.ui.verdict import PLACES as NAMES
from esper.ui.verdict import answer


def write_arms_report(path: Path, comparison: Comparison) -> None:
    """Write the page; RunError if that fails."""
    write_atomically(path, arms_html(comparison))


def arms_html(comparison: Comparison) -> str:
    """The page of a policy and all arms."""
    facts = (
        f"The policies of {comparison.seeds} training seeds and every other arm on the same {comparison.instances} "
        "held-out instances."
    )
    sections = _arms_sections(comparison, exhibit_arms(comparison))
    return Page("Esper: a policy and all arms", "Does looking pay?", facts, (), sections).html()


def _arms_sections(comparison: Comparison, exhibits: ComparisonExhibits) -> list[Section]:
    about = [(one.name, ABOUT.get(one.name, "")) for one in comparison.standings]
    costs = [exhibits.growth, *([exhibits.flops] if exhibits.flops[1] else [])]
    return [
        Section("Who is better", [exhibits.standings]),
        Section("What it costs", costs),
        Section("Who is who", terms=about),
    ]


def contest_html(folder: Path, found: FinishedContest) -> str:
    """The page of a comparison of configurations."""
    configurations = found.configurations
    names = [one.name for one in configurations.standings]
    facts = (
        f"Comparison {folder}: {listed(names)}, {configurations.seeds} training seeds each, on the same "
        f"{configurations.instances} held-out instances."
    )
    sections = [Section("Configurations", [exhibit_configurations(configurations).standings])]
    if found.arms is not None:
        sections += _arms_sections(found.arms, exhibit_arms(found.arms, configurations.reference.name))
    answers = _verdicts(configurations)
    title = f"Esper: {folder.resolve().name}"
    return Page(title, "Which configuration is better?", facts, answers, sections).html()


def _verdicts(found: Comparison) -> list[Answer]:
    first = found.reference.name
    verdicts = [f"{first} against {one.name}: {verdict_words(found, one)}." for one, _ in found.others]
    return [Answer(" ".join(verdicts), [basis(found)])] if verdicts else []


def over_seeds_html(paths: Sequence[Path], comparisons: Mapping[Split, Comparison]) -> str:
    """The page of several evaluated runs that differ in their training seed."""
    answers: list[Answer] = []
    sections: list[Section] = []
    for split, exhibits in exhibit_evaluation(comparisons, over_seeds_source).items():
        found = comparisons[split]
        reply = answer(found, NAMES[split])
        answers.append(Answer(reply.short, [reply.sentence, basis(found)]))
        sections.append(Section(f"All controllers on {PLACES[split]}", [exhibits.standings, exhibits.seeds]))
    facts = f"Runs {listed([str(path) for path in paths])}."
    return Page("Esper: one way of training", "Did this way of training help?", facts, answers, sections).html()
