"""Tuning stays in its budget, is reproducible, and prefers what earns more."""

from __future__ import annotations

import pytest

from esper.control.rules.heuristic import HeuristicSettings
from esper.experiments.baselines import baseline_settings, baselines
from esper.experiments.tuning import FIRST_ROUND, Tuned, tune
from esper.experiments.workers import LocalWorkers
from esper.lifecycle.rules import Rules
from esper.tasks.registry import get_suite, suite_names

SUITE = get_suite("tokens")


def search(kind: str, candidates: int) -> Tuned:
    with LocalWorkers(1) as workers:
        return tune(kind, SUITE, Rules(), candidates * FIRST_ROUND * SUITE.steps, seed=3, workers=workers)


def test_tuning_keeps_to_its_budget() -> None:
    tuned = search("heuristic", 1)
    assert tuned.environment_steps == FIRST_ROUND * SUITE.steps
    assert isinstance(tuned.settings, HeuristicSettings)


@pytest.mark.slow
def test_tuning_repeats_itself() -> None:
    assert search("heuristic", 2) == search("heuristic", 2)


@pytest.mark.slow
def test_more_search_finds_more() -> None:
    assert search("periodic", 24).score > search("periodic", 1).score


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_has_baselines_that_fit_it(name: str) -> None:
    suite = get_suite(name)
    settings = baseline_settings(suite)
    places = [*settings.all_at_start, *settings.schedule, *settings.periodic.plantings, *settings.heuristic.preferences]
    assert all(slot < len(suite.sites) and kind < len(suite.blueprints) for slot, kind in places)
    assert [controller.name for controller in baselines(suite)] == [
        "none",
        "random",
        "all_at_start",
        "schedule",
        "periodic",
        "heuristic",
    ]
