"""Figures and tables of a comparison of configurations, and of a policy among all arms."""

from __future__ import annotations

from esper.experiments.compared_runs import ARMS, RECORDS, FinishedComparison
from esper.ui.figures.record import Exhibit, Files
from esper.ui.figures.standings import standing_exhibits

_FIELDS = (
    "score, test_accuracy, added_parameters / host_parameters and flops, averaged over training seeds and instances; "
    "intervals are over both.\n"
)
CONFIGURATIONS = Files(f"CONFIGURATION/seed-N/{RECORDS} in the comparison's folder: {_FIELDS}")
ALL_ARMS = Files(
    f"FIRST-CONFIGURATION/{ARMS}/ARM.json and FIRST-CONFIGURATION/seed-N/{ARMS}/ARM.json in the comparison's folder, "
    f"the list records.outcomes: {_FIELDS}"
)


def contest_exhibits(found: FinishedComparison) -> list[Exhibit]:
    """Of the configurations, and of all arms if they have played."""
    configurations = found.configurations
    played = f"{configurations.instances} held-out instances"
    seeds = f"{configurations.seeds} training seeds"
    about = f"all configurations, {seeds} each, on the same {played}"
    exhibits = standing_exhibits("configurations", about, CONFIGURATIONS, configurations)
    if found.arms is not None:
        about = f"the policies of {configurations.reference.name} ({seeds}) and all other arms on the same {played}"
        exhibits += standing_exhibits("arms", about, ALL_ARMS, found.arms)
    return exhibits
