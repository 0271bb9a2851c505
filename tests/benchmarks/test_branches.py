"""Branches off the rule: copies are copies, each takes one other choice, and errors are over suites."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from esper.control.rules import LookRule, LookSettings
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import Rules
from esper.tasks.registry import get_suite
from esper.train.evaluation import CohortPart, CohortTask, EvaluationConfig, evaluate_cohort

ROOT = Path(__file__).parents[2]
SUITE = "generated:9201"


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("branches")


@pytest.mark.landing
def test_a_copy_that_takes_no_other_choice_ends_as_its_original(branches: ModuleType) -> None:
    suite = get_suite(SUITE)
    (instance,) = suite.sample(1, "train", np.random.default_rng(0))
    rule = LookRule(LookSettings(), suite.steps)
    played = [rule, branches.Branching(rule, np.full(2, -1), seed=0)]
    config = EvaluationConfig(SUITE, Rules()).for_controller(rule)
    (original,), copies = (
        result.records
        for result in evaluate_cohort(
            CohortTask(config, [CohortPart(played[0], [instance]), CohortPart(played[1], [instance] * 2)])
        )
    )
    assert {(one.score, one.added_parameters) for one in copies} == {(original.score, original.added_parameters)}
    assert not played[1].described


@pytest.mark.landing
def test_each_copy_takes_one_other_legal_choice(branches: ModuleType) -> None:
    """Choices are legal, or the episodes would refuse them, and are what the rule does not do there."""
    collected = branches.collect_branches(branches.Collection(SUITE, 0.0, 1, 5))
    count = len(collected["worth"])
    assert 1 <= count <= 5
    assert {len(values) for values in collected.values()} == {count}
    width = collected["described"].shape[1]
    ops = len(Op)
    # The operation taken and that of the rule are among what is described.
    one_hot = np.eye(ops)[collected["ops"]].reshape(count, -1)
    starts = [
        start
        for start in range(width - 2 * ops + 1)
        if (collected["described"][:, start:][:, : 2 * ops] == one_hot).all()
    ]
    assert starts


def test_errors_are_over_clusters(branches: ModuleType) -> None:
    values = np.array([1.0, 2.0, 4.0, 7.0])
    alone = branches.compute_error(values, np.arange(4))
    assert alone == pytest.approx(values.std() / 2)
    # Twice the same values in one cluster are no more evidence than once.
    doubled = branches.compute_error(np.repeat(values, 2), np.repeat(np.arange(4), 2))
    assert doubled == pytest.approx(alone)
