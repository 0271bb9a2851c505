"""Masks that never let an illegal action be sampled."""

from __future__ import annotations

import numpy as np
import pytest

from esper.lifecycle.actions import ALPHA_TARGETS, Head, Op, action, wait
from esper.lifecycle.legality import canonicalise, check, legal
from esper.lifecycle.masks import ActionMasks, legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import step
from lifecycle.support import (
    DEFAULT,
    RULE_SETS,
    good_evidence,
    play,
    random_compatibility,
    random_evidence,
    sample,
)
from open_rules import open_rules

WAIT = wait(1)[0]


def masks_of(table: SeedTable, rules: Rules = DEFAULT, evidence: Evidence | None = None) -> ActionMasks:
    shape = table.stage.shape
    seen = good_evidence(*shape) if evidence is None else evidence
    return legal_actions(table, seen, rules, np.ones((*shape, 3), np.bool_))


@pytest.mark.parametrize("name", ["default-none", "wide-shadow", "narrow-shadow", "one_target-none"])
def test_sampling_head_by_head_is_always_legal(name: str) -> None:
    """In all 128,000 samples over populations in all stages; `check` accepts each, and the plain rules below do."""
    environments, slots, blueprints = 1000, 3, 5
    rules, generator = RULE_SETS[name], np.random.default_rng(11)
    compatible = random_compatibility(environments, slots, blueprints, generator)
    table = SeedTable.dormant(environments, slots)
    stages: set[int] = set()
    for _ in range(32):
        evidence = random_evidence(environments, slots, generator)
        masks = legal_actions(table, evidence, rules, compatible)
        actions = sample(masks, generator)
        check(actions, masks)
        assert_within_rules(table, actions, rules)
        table = step(table, evidence, actions, rules, compatible).table
        stages |= set(table.stage.ravel().tolist())
    assert len(stages) >= 7


def assert_within_rules(table: SeedTable, actions: np.ndarray, rules: Rules) -> None:
    """What can be said of legal actions without asking the masks."""
    op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
    stage = table.stage[np.arange(len(actions)), slot]
    assert np.isin(op, rules.operations).all()
    assert (stage[op == Op.GERMINATE] == Stage.DORMANT).all()
    assert (stage[op == Op.ADVANCE] == Stage.TRAINING).all()
    assert np.isin(stage[op == Op.SET_ALPHA], (Stage.BLENDING, Stage.HOLDING)).all()
    assert (stage[op == Op.FOSSILIZE] == Stage.HOLDING).all()
    assert np.isin(stage[op == Op.PRUNE], (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)).all()
    assert not actions[op == Op.WAIT].any()


def test_an_empty_network_may_wait_or_germinate() -> None:
    masks = masks_of(SeedTable.dormant(2, 3))
    assert np.flatnonzero(masks.op[1]).tolist() == [Op.WAIT, Op.GERMINATE]
    assert masks.slot[0, Op.WAIT].tolist() == [True, False, False]
    assert masks.slot[0, Op.GERMINATE].all()


def test_a_slot_that_no_blueprint_fits_stays_empty() -> None:
    compatible = np.array([[[False, False], [False, True]]])
    masks = legal_actions(SeedTable.dormant(1, 2), good_evidence(1, 2), DEFAULT, compatible)
    assert masks.slot[0, Op.GERMINATE].tolist() == [False, True]
    assert masks.given(Head.BLUEPRINT, np.array([Op.GERMINATE]), np.array([1])).tolist() == [[False, True]]
    nothing = legal_actions(SeedTable.dormant(1, 2), good_evidence(1, 2), DEFAULT, np.zeros((1, 2, 2), np.bool_))
    assert np.flatnonzero(nothing.op[0]).tolist() == [Op.WAIT]


def test_a_seed_is_not_retargeted_to_where_it_is_or_goes() -> None:
    rising = play(SeedTable.dormant(1, 1), DEFAULT, action(Op.GERMINATE, alpha_target=0.7), WAIT).table
    held = play(rising, DEFAULT, WAIT, WAIT, WAIT).table
    assert (rising.stage[0, 0], held.stage[0, 0]) == (Stage.BLENDING, Stage.HOLDING)
    for table in (rising, held):
        allowed = masks_of(table).given(Head.ALPHA_TARGET, np.array([Op.SET_ALPHA]), np.array([0]))[0]
        assert [target for target, legal in zip(ALPHA_TARGETS, allowed, strict=True) if legal] == [0.5, 1.0]


def test_fossilizing_needs_evidence() -> None:
    held = play(SeedTable.dormant(1, 1), DEFAULT, action(Op.GERMINATE), *[WAIT] * 4).table
    assert masks_of(held).op[0, Op.FOSSILIZE]
    assert not masks_of(held, evidence=Evidence.none(1, 1)).op[0, Op.FOSSILIZE]


def test_a_fossil_leaves_nothing_to_do() -> None:
    life = (action(Op.GERMINATE), WAIT, WAIT, WAIT, WAIT, action(Op.FOSSILIZE))
    fossil = play(SeedTable.dormant(1, 1), DEFAULT, *life).table
    assert np.flatnonzero(masks_of(fossil).op[0]).tolist() == [Op.WAIT]


def test_the_rules_narrow_the_choices() -> None:
    rules = open_rules(operations=(Op.WAIT, Op.GERMINATE), tempos=(5,), alpha_targets=(0.5, 1.0))
    table = SeedTable.dormant(1, 1)
    op, slot = np.array([Op.GERMINATE]), np.array([0])
    masks = masks_of(table, rules)
    assert masks.given(Head.BLEND, op, slot).tolist() == [[True, False, False]]
    assert masks.given(Head.TEMPO, op, slot).tolist() == [[False, True, False]]
    assert masks.given(Head.ALPHA_TARGET, op, slot).tolist() == [[True, False, True]]
    germinated = play(table, rules, action(Op.GERMINATE, tempo=5)).table
    assert np.flatnonzero(masks_of(germinated, rules).op[0]).tolist() == [Op.WAIT]


def test_an_irrelevant_head_can_only_be_zero() -> None:
    masks = masks_of(SeedTable.dormant(1, 2))
    for head in list(Head)[Head.BLUEPRINT :]:
        assert np.flatnonzero(masks.given(head, np.array([Op.WAIT]), np.array([0]))[0]).tolist() == [0]


def test_flat_masks_start_each_head_with_a_legal_choice() -> None:
    """WAIT is always legal, and all its other heads are 0."""
    masks = masks_of(SeedTable.dormant(2, 3))
    flat = masks.flat()
    assert masks.sizes == (6, 3, 3, 3, 3, 3, 4, 3)
    assert flat.shape == (2, sum(masks.sizes))
    firsts = np.cumsum((0, *masks.sizes[:-1]))
    assert flat[:, firsts].all()
    speeds = slice(firsts[Head.ALPHA_SPEED], firsts[Head.ALPHA_CURVE])
    assert flat[0, speeds].tolist() == [True, False, False, False]


def test_those_who_must_wait_may_do_nothing_else() -> None:
    masks = masks_of(SeedTable.dormant(3, 2)).waiting(np.array([True, False, True]))
    assert masks.op.sum(axis=1).tolist() == [1, 2, 1]
    assert legal(wait(3), masks).all()
    germinate = np.stack([action(Op.GERMINATE)] * 3)
    assert legal(germinate, masks).tolist() == [False, True, False]
    assert canonicalise(germinate, masks)[0][:, 0].tolist() == [Op.WAIT, Op.GERMINATE, Op.WAIT]
