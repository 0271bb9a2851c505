"""The search for a fixed sequence spends a policy's budget, never more, and follows from its seed."""

from __future__ import annotations

import pytest

from esper.control.rules import Schedule
from esper.lab.arms import FINALISTS, search_sequence
from esper.tasks.registry import get_suite
from esper.train.workers import LocalWorkers
from lab.arms.planting import TERMS


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.lab.arms.FIRST_ROUND", 3)


def searched(environment_steps: int, seed: int = 0) -> tuple[Schedule, int, list[int]]:
    spent: list[int] = []
    with LocalWorkers(1) as workers:
        return *search_sequence(TERMS, environment_steps, seed, workers, spent.append), spent


@pytest.mark.parametrize("episodes", [1, 8, 23, 61])
def test_the_budget_is_spent_but_for_less_than_an_episode_per_finalist(episodes: int) -> None:
    steps = get_suite("short").steps
    budget = episodes * steps + 3
    _, taken, spent = searched(budget)
    assert len(spent) == (1 if episodes < 24 else 2), "rounds"
    assert sum(spent) == taken <= budget
    assert budget - taken < FINALISTS * steps + 3 + 1


def test_less_than_an_episode_finds_nothing_to_do() -> None:
    sequence, taken, spent = searched(get_suite("short").steps - 1)
    assert (taken, spent, sequence.plantings) == (0, [], ())


@pytest.mark.landing
def test_a_seed_has_a_search_of_its_own() -> None:
    budget = 30 * get_suite("short").steps
    first, again, other = (searched(budget, seed)[0] for seed in (1, 1, 2))
    assert first.plantings == again.plantings
    assert first.plantings != other.plantings
