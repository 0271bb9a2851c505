"""Tuning stays in its budget, is reproducible, and prefers what earns more."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.tune_rules import TuningResult, tune
from esper.control.rules import HeuristicSettings, Periodic, PeriodicSettings
from esper.errors import ConfigError
from esper.lab import experiment
from esper.lab.experiment import FIRST_ROUND
from esper.lifecycle.rules import Rules
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationConfig, EvaluationResult
from esper.train.results import Result
from esper.train.workers import LocalWorkers

SUITE = get_suite("tokens")


def search(kind: str, candidates: int, seed: int = 3) -> TuningResult:
    with LocalWorkers(1) as workers:
        return tune(kind, SUITE, Rules(), candidates * FIRST_ROUND * SUITE.steps, seed, workers)


def test_tuning_keeps_to_its_budget() -> None:
    tuned = search("heuristic", 1)
    assert tuned.environment_steps == FIRST_ROUND * SUITE.steps
    assert isinstance(tuned.settings, HeuristicSettings)


def test_a_budget_that_is_too_small_for_one_candidate_is_refused() -> None:
    fewest = FIRST_ROUND * SUITE.steps
    with LocalWorkers(1) as workers, pytest.raises(ConfigError, match=f"1: one candidate takes {fewest}"):
        tune("heuristic", SUITE, Rules(), 1, 3, workers)


@pytest.mark.slow
def test_tuning_repeats_itself() -> None:
    assert search("heuristic", 2) == search("heuristic", 2)


def quality(settings: PeriodicSettings) -> float:
    """What a planted world pays for these settings, whatever the instance: best is an early end after long trials."""
    return settings.probation / 10 - settings.stop_after + settings.margin + settings.period / 100


def planted(noise: float) -> Callable[..., list[EvaluationResult]]:
    """A stand-in for `play` in that world, with luck per controller and instance."""
    rng = np.random.default_rng(0)

    def played(
        workers: LocalWorkers, controllers: Sequence[Periodic], terms: EvaluationConfig, instances: Sequence[Instance]
    ) -> list[EvaluationResult]:
        return [
            EvaluationResult(
                [
                    Result(
                        "", one.name, one.family, one.variant, quality(each._settings) + rng.normal(0, noise), 0, 0, 1
                    )
                    for one in instances
                ],
                [],
            )
            for each in controllers
        ]

    return played


def test_the_best_of_all_candidates_wins_where_luck_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    play = planted(0.0)

    def watched(workers: LocalWorkers, controllers: Sequence[Periodic], *more: Any) -> list[EvaluationResult]:
        seen.extend(quality(each._settings) for each in controllers)
        return play(workers, controllers, *more)

    monkeypatch.setattr(experiment, "evaluate_controllers", watched)
    tuned = search("periodic", 100)
    assert isinstance(tuned.settings, PeriodicSettings)
    assert len(set(seen)) > 10
    assert quality(tuned.settings) == max(seen)
    assert tuned.score == pytest.approx(max(seen)), "the winner's own score is reported"


def test_more_search_finds_better_settings_through_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what settings are worth, not by the score that they were chosen for, which rises with any search."""
    monkeypatch.setattr(experiment, "evaluate_controllers", planted(1.0))
    worth = [
        np.mean([quality(search("periodic", candidates, seed).settings) for seed in range(20)])
        for candidates in (1, 10, 100)
    ]
    assert worth[0] + 0.2 < worth[1]
    assert worth[1] + 0.1 < worth[2]
