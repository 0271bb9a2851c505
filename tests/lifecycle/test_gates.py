"""Each gate lets a seed pass for the right reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esper.lifecycle.actions import Op
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.rules import GATES, Reason, evaluate_gates
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from lifecycle.support import good_evidence
from open_rules import open_rules

RULES = open_rules(min_training_steps=3, evidence_max_age=2, harm_tolerance=0.5)


def slot(stage: Stage, **values: float) -> SeedTable:
    """One slot in a stage, with some values set."""
    table = SeedTable.dormant(1, 1)
    table.stage[:] = stage
    for name, value in values.items():
        getattr(table, name)[:] = value
    return table


def seen(**values: float):
    """Good evidence with some values replaced."""
    evidence = good_evidence()
    arrays = {name: np.full((1, 1), value, getattr(evidence, name).dtype) for name, value in values.items()}
    return replace(evidence, **arrays)


@pytest.mark.parametrize(("probed", "reason"), [(True, Reason.PASSED), (False, Reason.NOT_PROBED)])
def test_g1_asks_for_a_probe(probed: bool, reason: Reason) -> None:
    verdicts = evaluate_gates(slot(Stage.GERMINATED), seen(probed=probed), RULES)
    assert (verdicts.reason[0, 0], verdicts.passed[0, 0]) == (reason, probed)


@pytest.mark.parametrize(
    ("age", "healthy", "reason"),
    [
        (3, True, Reason.PASSED),
        (9, True, Reason.PASSED),
        (2, True, Reason.TOO_YOUNG),
        (2, False, Reason.TOO_YOUNG),
        (3, False, Reason.GRADIENT_UNHEALTHY),
    ],
)
def test_g2_asks_for_training_and_healthy_gradients(age: int, healthy: bool, reason: Reason) -> None:
    verdicts = evaluate_gates(slot(Stage.TRAINING, stage_age=age), seen(gradient_healthy=healthy), RULES)
    assert verdicts.reason[0, 0] == reason
    assert verdicts.passed[0, 0] == (reason == Reason.PASSED)


@pytest.mark.parametrize(("elapsed", "reason"), [(3, Reason.PASSED), (2, Reason.ALPHA_MOVING)])
def test_g3_asks_for_alpha_at_its_target(elapsed: int, reason: Reason) -> None:
    table = slot(Stage.BLENDING, alpha_elapsed=elapsed, alpha_duration=3)
    assert evaluate_gates(table, good_evidence(), RULES).reason[0, 0] == reason


@pytest.mark.parametrize(("elapsed", "legal"), [(3, True), (2, False)])
def test_a_held_seed_whose_alpha_moves_is_not_fossilized(elapsed: int, legal: bool) -> None:
    table = slot(Stage.HOLDING, alpha_elapsed=elapsed, alpha_duration=3)
    masks = legal_actions(table, good_evidence(), RULES, np.ones((1, 1, 1), np.bool_))
    assert masks.slot[0, Op.FOSSILIZE, 0] == legal


@pytest.mark.parametrize(
    ("contribution", "age", "reason"),
    [
        (0.0, 0, Reason.PASSED),
        (-0.5, 2, Reason.PASSED),
        (-0.51, 0, Reason.HARMFUL),
        (1.0, 3, Reason.STALE),
        (-1.0, 3, Reason.STALE),
        (np.nan, 0, Reason.NOT_MEASURED),
        (np.nan, 9, Reason.NOT_MEASURED),
    ],
)
def test_g5_asks_for_a_fresh_harmless_contribution(contribution: float, age: int, reason: Reason) -> None:
    verdicts = evaluate_gates(slot(Stage.HOLDING), seen(contribution=contribution, contribution_age=age), RULES)
    assert verdicts.reason[0, 0] == reason
    assert verdicts.passed[0, 0] == (reason == Reason.PASSED)


def test_gates_say_nothing_of_slots_elsewhere() -> None:
    for stage in Stage:
        verdict = evaluate_gates(slot(stage, stage_age=9), good_evidence(), RULES)
        assert verdict.reason[0, 0] == (Reason.PASSED if stage in GATES else Reason.NO_GATE)
        assert verdict.passed[0, 0] == (stage in GATES)


def test_gate_ahead_is_the_gate_of_the_stage() -> None:
    """With nothing in order, each stage is stopped by its own gate."""
    evidence = seen(probed=False, contribution=-1.0)
    stopped = {
        Stage.GERMINATED: Reason.NOT_PROBED,
        Stage.TRAINING: Reason.TOO_YOUNG,
        Stage.BLENDING: Reason.ALPHA_MOVING,
        Stage.HOLDING: Reason.HARMFUL,
    }
    for stage, reason in stopped.items():
        assert evaluate_gates(slot(stage, alpha_duration=1), evidence, RULES).reason[0, 0] == reason
