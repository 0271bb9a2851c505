"""Every suite has the controllers that a policy is compared with."""

from __future__ import annotations

import pytest

from esper.tasks.registry import get_suite, suite_names
from esper.train.evaluation import create_baselines, load_baseline_settings


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_has_baselines_that_fit_it(name: str) -> None:
    suite = get_suite(name)
    settings = load_baseline_settings(suite)
    places = [*settings.all_at_start, *settings.schedule, *settings.periodic.plantings, *settings.heuristic.preferences]
    assert all(slot < len(suite.sites) and kind < len(suite.blueprints) for slot, kind in places)
    assert [controller.name for controller in create_baselines(suite)] == [
        "none",
        "random",
        "all_at_start",
        "schedule",
        "periodic",
        "heuristic",
        "look",
    ]
