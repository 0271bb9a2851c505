"""Figures and tables of a comparison of configurations, and of a policy among all arms."""

from __future__ import annotations

from esper.experiments.comparison import POLICY, Comparison
from esper.experiments.contest import ARMS, FinishedContest
from esper.ui.figures.record import Exhibit, Files
from esper.ui.figures.standings import ComparisonExhibits, exhibit_comparison

_FIELDS = (
    "score, test_accuracy, added_parameters / host_parameters and flops, averaged over training seeds and instances; "
    "intervals are over both.\n"
)
CONFIGURATIONS = Files(
    f"CONFIGURATION/seed-N/{ARMS}/{POLICY}.json in the comparison's folder, the list value.outcomes: {_FIELDS}"
)
ALL_ARMS = Files(
    f"FIRST-CONFIGURATION/{ARMS}/ARM.json and FIRST-CONFIGURATION/seed-N/{ARMS}/ARM.json in the comparison's folder, "
    f"the list value.outcomes: {_FIELDS}"
)


def contest_exhibits(found: FinishedContest) -> list[Exhibit]:
    """Of the configurations, and of all arms if they have played."""
    arms = [] if found.arms is None else exhibit_arms(found.arms, found.configurations.reference.name).all()
    return [*exhibit_configurations(found.configurations).all(), *arms]


def exhibit_configurations(found: Comparison) -> ComparisonExhibits:
    """The first configuration against the others."""
    about = f"all configurations, {found.seeds} training seeds each, on the same {found.instances} held-out instances"
    return exhibit_comparison("configurations", about, CONFIGURATIONS, found)


def exhibit_arms(found: Comparison, configuration: str = "") -> ComparisonExhibits:
    """Policies of a configuration among all arms."""
    trained = f" of {configuration}" if configuration else ""
    about = (
        f"the policies{trained} ({found.seeds} training seeds) and all other arms on the same {found.instances} "
        "held-out instances"
    )
    return exhibit_comparison("arms", about, ALL_ARMS, found)
