"""Illegal actions are refused with a reason, or made legal; masks never let one be sampled."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import IllegalActionError
from esper.lifecycle.actions import Blend, Curve, Head, Op, make_action, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Rules, canonicalise, is_legal, legal_actions, require_legal
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import step
from lifecycle import reference
from lifecycle.support import (
    DEFAULT,
    RULE_SETS,
    good_measurements,
    play,
    random_compatibility,
    random_measurements,
    sample,
)
from lifecycle.test_reference import measured
from open_rules import open_rules

WAIT = make_wait_actions(1)[0]
EMPTY = SeedTable.dormant(1, 2)
RISING = play(EMPTY, open_rules(), make_action(Op.GERMINATE), WAIT).table
HELD = play(RISING, open_rules(), WAIT, WAIT, WAIT).table
FALLING = play(HELD, open_rules(), make_action(Op.PRUNE, alpha_speed=3)).table
TRAINING = play(EMPTY, open_rules(isolation="shadow"), make_action(Op.GERMINATE), WAIT).table
FOSSIL = play(HELD, open_rules(), make_action(Op.FOSSILIZE)).table


def masks_of(table: SeedTable, rules: Rules | None = None, measurements: SeedMeasurements | None = None) -> ActionMasks:
    shape = table.stage.shape
    compatible = np.zeros((*shape, 3), np.bool_)
    compatible[:, 0, :2] = True
    return legal_actions(table, measurements or good_measurements(*shape), rules or open_rules(), compatible)


REFUSALS = {
    "germinate where a seed is": (RISING, make_action(Op.GERMINATE), "BLENDING", "needs stage DORMANT"),
    "advance a blending seed": (RISING, make_action(Op.ADVANCE), "BLENDING", "needs stage TRAINING"),
    "retarget nothing": (EMPTY, make_action(Op.SET_ALPHA), "DORMANT", "needs stage BLENDING or HOLDING"),
    "fossilize too early": (RISING, make_action(Op.FOSSILIZE), "BLENDING", "needs stage HOLDING"),
    "prune nothing": (
        EMPTY,
        make_action(Op.PRUNE),
        "DORMANT",
        "needs stage GERMINATED or TRAINING or BLENDING or HOLDING",
    ),
    "prune a fossil": (FOSSIL, make_action(Op.PRUNE), "FOSSILIZED", "needs stage GERMINATED"),
    "prune twice": (FALLING, make_action(Op.PRUNE), "BLENDING", "already being pruned"),
    "rescue a falling seed": (FALLING, make_action(Op.SET_ALPHA), "BLENDING", "already being pruned"),
    "advance too early": (TRAINING, make_action(Op.ADVANCE), "TRAINING", "gate G2 is closed, TOO_YOUNG"),
    "germinate where nothing fits": (EMPTY, make_action(Op.GERMINATE, slot=1), "DORMANT", "no blueprint is compatible"),
    "germinate what does not fit": (
        EMPTY,
        make_action(Op.GERMINATE, blueprint=2),
        "DORMANT",
        "blueprint 2 is not compatible with this slot",
    ),
    "blueprint off the list": (
        EMPTY,
        make_action(Op.GERMINATE, blueprint=3),
        "DORMANT",
        "blueprint 3 is out of range 0 to 2",
    ),
    "retarget to the same": (
        HELD,
        make_action(Op.SET_ALPHA),
        "HOLDING",
        r"\(1.0\) is the target that the seed already has",
    ),
    "blend not allowed": (EMPTY, make_action(Op.GERMINATE, blend=Blend.GATE), "DORMANT", r"leave blend 1 \(gate\) out"),
    "wait with a slot": (EMPTY, np.array([0, 1, 0, 0, 0, 0, 0, 0]), "DORMANT", "slot must be 0"),
    "wait with a curve": (EMPTY, np.array([0, 0, 0, 0, 0, 0, 0, 2]), "DORMANT", "does not read alpha_curve"),
    "fossilize with a tempo": (HELD, np.array([4, 0, 0, 0, 1, 0, 0, 0]), "HOLDING", "does not read tempo"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_environment_slot_stage_and_rule(name: str) -> None:
    table, chosen, stage, rule = REFUSALS[name]
    # The offender is environment 1 of 2.
    pair, actions = table.rows([0, 0]), np.stack([WAIT, chosen])
    pattern = rf"^environment 1, slot {chosen[Head.SLOT]} \(stage {stage}\): {Op(chosen[0]).name} is illegal: .*{rule}"
    with pytest.raises(IllegalActionError, match=pattern):
        require_legal(actions, masks_of(pair))


@pytest.mark.parametrize(
    ("chosen", "rule"),
    [
        (np.array([6, 0, 0, 0, 0, 0, 0, 0]), "operation 6 is out of range 0 to 5"),
        (np.array([-1, 0, 0, 0, 0, 0, 0, 0]), "operation -1 is out of range"),
        (np.array([1, 2, 0, 0, 0, 0, 0, 0]), "GERMINATE at slot 2: the slot is out of range 0 to 1"),
        (np.array([5, -1, 0, 0, 0, 0, 0, 0]), "PRUNE at slot -1: the slot is out of range"),
    ],
)
def test_without_a_slot_the_refusal_names_the_value(chosen: np.ndarray, rule: str) -> None:
    with pytest.raises(IllegalActionError, match=f"^environment 0: {rule}"):
        require_legal(chosen[None], masks_of(EMPTY))


def test_what_the_rules_leave_out_is_refused() -> None:
    with pytest.raises(IllegalActionError, match="the rules leave this operation out"):
        require_legal(make_action(Op.PRUNE)[None], masks_of(HELD, open_rules(operations=(Op.WAIT, Op.FOSSILIZE))))
    with pytest.raises(IllegalActionError, match=r"leave alpha_target 0 \(0.5\) out"):
        require_legal(
            make_action(Op.SET_ALPHA, alpha_target=0.5)[None], masks_of(HELD, open_rules(alpha_targets=(0.7, 1.0)))
        )
    with pytest.raises(IllegalActionError, match=r"leave alpha_speed 1 \(3\) out"):
        require_legal(make_action(Op.PRUNE, alpha_speed=3)[None], masks_of(HELD, open_rules(alpha_speeds=(0, 8))))
    with pytest.raises(IllegalActionError, match=r"leave alpha_curve 1 \(cosine\) out"):
        require_legal(
            make_action(Op.PRUNE, alpha_curve=Curve.COSINE)[None], masks_of(HELD, open_rules(alpha_curves=("linear",)))
        )


def test_a_closed_gate_5_is_named() -> None:
    with pytest.raises(IllegalActionError, match="gate G5 is closed, NOT_MEASURED"):
        require_legal(make_action(Op.FOSSILIZE)[None], masks_of(HELD, measurements=SeedMeasurements.none(1, 2)))


@pytest.mark.parametrize(
    "actions", [WAIT, make_wait_actions(3), np.zeros((1, 7), np.int64), np.zeros((1, 8), np.float32)]
)
def test_arrays_of_another_shape_or_kind_are_refused(actions: np.ndarray) -> None:
    for refuse in (require_legal, canonicalise):
        with pytest.raises(IllegalActionError, match=r"integer array of shape \(1, 8\)"):
            refuse(actions, masks_of(EMPTY))


@pytest.mark.parametrize("name", RULE_SETS)
def test_check_refuses_exactly_what_the_plain_rules_forbid(name: str) -> None:
    """Random integers, some out of range, and slight distortions of legal actions."""
    environments, slots, blueprints = 40, 3, 3
    rules, generator = RULE_SETS[name], np.random.default_rng(3)
    compatible = random_compatibility(environments, slots, blueprints, generator)
    fits = compatible.tolist()
    table = SeedTable.dormant(environments, slots)
    population = [[reference.Slot() for _ in range(slots)] for _ in range(environments)]
    verdicts = {True: 0, False: 0}
    for _ in range(25):
        measurements = random_measurements(environments, slots, generator)
        facts = measured(measurements)
        masks = legal_actions(table, measurements, rules, compatible)
        taken = sample(masks, generator)
        tried = taken.copy()
        distorted = generator.random(environments) < 0.7
        head = generator.integers(0, len(Head), environments)
        tried[distorted, head[distorted]] = generator.integers(-1, 6, environments)[distorted]
        for number, environment in enumerate(population):
            allowed = reference.is_legal(environment, facts[number], tried[number].tolist(), rules, fits[number])
            verdicts[allowed] += 1
            actions = make_wait_actions(environments)
            actions[number] = tried[number]
            if allowed:
                require_legal(actions, masks)
            else:
                with pytest.raises(IllegalActionError, match=expected_place(number, tried[number], table)):
                    require_legal(actions, masks)
        table = step(table, measurements, taken, rules, compatible).table
        for environment, row, chosen in zip(population, facts, taken.tolist(), strict=True):
            reference.step(environment, row, chosen, rules)
    assert min(verdicts.values()) > 100


def expected_place(number: int, tried: np.ndarray, table: SeedTable) -> str:
    op, slot = tried[Head.OP], tried[Head.SLOT]
    if not 0 <= op < len(Op) or not 0 <= slot < table.slots:
        return f"^environment {number}: "
    stage = Stage(table.stage[number, slot]).name
    return rf"^environment {number}, slot {slot} \(stage {stage}\): {Op(op).name} is illegal: \w+"


TABLES = (EMPTY, RISING, HELD, FALLING, FOSSIL)


@given(
    st.sampled_from(range(len(TABLES))),
    st.lists(st.integers(-2, 7), min_size=len(Head), max_size=len(Head)),
    st.integers(0, 2**32 - 1),
)
def test_canonicalise_gives_legal_actions_and_keeps_them(number: int, integers: list[int], seed: int) -> None:
    """Whatever the integers: the result is legal, a second time changes nothing, and legal actions stay."""
    masks = masks_of(TABLES[number])
    for actions in (np.array([integers]), sample(masks, np.random.default_rng(seed))):
        before = actions.copy()
        effective, changed = canonicalise(actions, masks)
        assert np.array_equal(actions, before)
        assert is_legal(effective, masks).all()
        assert changed.tolist() == [not np.array_equal(effective, actions)]
        again, changed_again = canonicalise(effective, masks)
        assert np.array_equal(again, effective)
        assert not changed_again.any()
        if is_legal(actions, masks)[0]:
            assert not changed.any()
        else:
            assert changed.all()


def test_canonicalise_keeps_what_is_legal_but_for_irrelevant_heads() -> None:
    """WAIT is the answer only where nothing of the action can be kept."""
    masks = masks_of(EMPTY.rows([0, 0, 0, 0]))
    germinate = make_action(Op.GERMINATE, blueprint=1, tempo=5)
    noisy = germinate.copy()
    noisy[Head.ALPHA_CURVE], noisy[Head.ALPHA_SPEED] = 99, -5
    effective, changed = canonicalise(np.stack([germinate, noisy, make_action(Op.PRUNE), np.full(8, 3) * 9]), masks)
    assert np.array_equal(effective, np.stack([germinate, germinate, WAIT, WAIT]))
    assert changed.tolist() == [False, True, True, True]


def masks_where_all_fit(
    table: SeedTable, rules: Rules = DEFAULT, measurements: SeedMeasurements | None = None
) -> ActionMasks:
    shape = table.stage.shape
    seen = good_measurements(*shape) if measurements is None else measurements
    return legal_actions(table, seen, rules, np.ones((*shape, 3), np.bool_))


def test_flat_masks_start_each_head_with_a_legal_choice() -> None:
    """WAIT is always legal, and all its other heads are 0."""
    masks = masks_where_all_fit(SeedTable.dormant(2, 3))
    flat = masks.flat()
    assert masks.sizes == (6, 3, 3, 3, 3, 3, 4, 3)
    assert flat.shape == (2, sum(masks.sizes))
    firsts = np.cumsum((0, *masks.sizes[:-1]))
    assert flat[:, firsts].all()
    speeds = slice(firsts[Head.ALPHA_SPEED], firsts[Head.ALPHA_CURVE])
    assert flat[0, speeds].tolist() == [True, False, False, False]


def test_those_who_must_wait_may_do_nothing_else() -> None:
    waiting = np.repeat(np.array([[True], [False], [True]]), len(Op), axis=1)
    masks = masks_where_all_fit(SeedTable.dormant(3, 2)).without(waiting)
    assert masks.op.sum(axis=1).tolist() == [1, 2, 1]
    assert is_legal(make_wait_actions(3), masks).all()
    germinate = np.stack([make_action(Op.GERMINATE)] * 3)
    assert is_legal(germinate, masks).tolist() == [False, True, False]
    assert canonicalise(germinate, masks)[0][:, 0].tolist() == [Op.WAIT, Op.GERMINATE, Op.WAIT]


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.WAIT])
def test_an_operation_that_is_left_out_is_legal_nowhere_and_others_stay(op: Op) -> None:
    table = replace(SeedTable.dormant(1, 3), stage=np.array([[Stage.DORMANT, Stage.HOLDING, Stage.TRAINING]], np.int8))
    whole = masks_where_all_fit(table)
    masks = whole.without(np.arange(len(Op))[None] == op)
    assert not masks.op[0, op]
    assert not masks.slot[0, op].any()
    kept = [other for other in Op if other is not op]
    np.testing.assert_array_equal(masks.op[:, kept], whole.op[:, kept])
    np.testing.assert_array_equal(masks.slot[:, kept], whole.slot[:, kept])
    assert masks.blueprint.any() == (op is not Op.GERMINATE)


KNOWN = {
    "the defaults": Rules(),
    "two targets": Rules(operations=(Op.WAIT, Op.GERMINATE, Op.SET_ALPHA), alpha_targets=(0.5, 1.0)),
    "another tempo": Rules(tempos=(8,)),
}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("name", ["EMPTY", "RISING", "HELD", "FALLING", "FOSSIL"])
def test_narrowed_masks_are_those_of_narrowed_rules(name: str, known: str) -> None:
    """Whatever the state of the seeds, as if the rules had been so from the start; so sampling stays legal."""
    table, rules = globals()[name], open_rules(blends=tuple(Blend))
    narrowed = masks_where_all_fit(table, rules).narrow(KNOWN[known])
    expected = masks_where_all_fit(table, rules.narrow(KNOWN[known]))
    for head in ("op", "slot", "blueprint", "blend", "tempo", "alpha_target", "alpha_speed", "alpha_curve"):
        np.testing.assert_array_equal(getattr(narrowed, head), getattr(expected, head), head)
    assert narrowed.grounds.rules == expected.grounds.rules
