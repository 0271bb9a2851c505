"""Reports of comparisons: of configurations, of a policy and all arms, and of runs with several training seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from esper.dash.formats import join_words
from esper.lab.comparison import Comparison
from esper.lab.contest import FinishedContest
from esper.lab.figures.comparison import exhibit_arms, exhibit_configurations, exhibit_evaluation
from esper.lab.figures.exhibit import Exhibit
from esper.lab.report.page import Headline, Page, Report, Section
from esper.lab.standings import (
    ABOUT,
    SPLIT_TITLES,
    describe_basis,
    did_it_help,
    record_comparison,
    record_evaluation,
    verdict_words,
)
from esper.tasks.suite import Split


def report_configurations(folder: Path, found: FinishedContest) -> Report:
    """A comparison of configurations, and all arms if they have played."""
    configurations, arms = found.configurations, found.arms
    first, names = configurations.reference.name, [one.name for one in configurations.standings]
    facts = (
        f"Comparison {folder}: {join_words(names)}, {configurations.seeds} training seeds each, on the same "
        f"{configurations.instances} held-out instances."
    )
    exhibits, comparisons = exhibit_configurations(configurations), {"configurations": configurations}
    shown, sections = [*exhibits.values()], [Section("Configurations", [exhibits["standings"]])]
    if arms is not None:
        arm_exhibits, comparisons["arms"] = exhibit_arms(arms, first), arms
        shown += arm_exhibits.values()
        sections += _show_arms(arms, arm_exhibits)
    verdicts = [
        f"{first} against {one.name}: {verdict_words(configurations, one)}." for one, _ in configurations.others
    ]
    headlines = [Headline(" ".join(verdicts), [describe_basis(configurations)])] if verdicts else []
    title = f"Esper: {folder.resolve().name}"
    page = Page(title, "Which configuration is better?", facts, headlines, sections)
    verdicts = {name: asdict(record_comparison(comparison)) for name, comparison in comparisons.items()}
    return Report(page.html(), shown, comparisons, verdicts)


def _show_arms(comparison: Comparison, exhibits: Mapping[str, Exhibit]) -> list[Section]:
    about = [(one.name, ABOUT.get(one.name, "")) for one in comparison.standings]
    costs = [exhibits["growth"], *([exhibits["flops"]] if exhibits["flops"].rows else [])]
    return [
        Section("Who is better", [exhibits["standings"]]),
        Section("What it costs", costs),
        Section("Who is who", terms=about),
    ]


def report_over_seeds(paths: Sequence[Path], comparisons: Mapping[Split, Comparison]) -> Report:
    """Several evaluated runs that differ in their training seed alone."""
    headlines: list[Headline] = []
    sections: list[Section] = []
    evaluated = exhibit_evaluation(comparisons)
    for split, exhibits in evaluated.items():
        answer = did_it_help(comparisons[split], split)
        headlines.append(Headline(answer.short, [answer.sentence, describe_basis(comparisons[split])]))
        shown = [exhibits["standings"], exhibits["seeds"]]
        sections.append(Section(f"All controllers on {SPLIT_TITLES[split]}", shown))
    facts = f"Runs {join_words([str(path) for path in paths])}."
    page = Page("Esper: one way of training", "Did this way of training help?", facts, headlines, sections)
    return Report(
        page.html(),
        [one for exhibits in evaluated.values() for one in exhibits.values()],
        {SPLIT_TITLES[split]: found for split, found in comparisons.items()},
        record_evaluation(comparisons),
    )
