"""The lifecycle's settings."""

from dataclasses import fields, replace

import numpy as np
import pytest
from pydantic import ValidationError

from esper.config.settings import Settings
from esper.errors import IllegalActionError
from esper.lifecycle.actions import (
    RELEVANT,
    Blend,
    Curve,
    Head,
    Op,
    PerHead,
    clear_irrelevant_heads,
    make_action,
    make_wait_actions,
)
from esper.lifecycle.rules import GATES, Isolation, Reason, Rules, evaluate_gates, legal_actions
from esper.lifecycle.table import BLENDED, LIVE, NO_BLUEPRINT, OWNING, SeedTable, Stage
from lifecycle.support import DEFAULT, RULE_SETS, good_measurements, play
from open_rules import OPEN_RULES, open_rules


@pytest.mark.parametrize("name", RULE_SETS)
@pytest.mark.parametrize("mode", ["json", "python"])
def test_settings_survive_a_round_trip(name: str, mode: str) -> None:
    assert Rules.model_validate(RULE_SETS[name].model_dump(mode=mode)) == RULE_SETS[name]


def test_files_write_names() -> None:
    rules = Rules.model_validate({"operations": ["wait", "Germinate"], "blends": ["gate"], "alpha_curves": ["cosine"]})
    assert rules.operations == (Op.WAIT, Op.GERMINATE)
    dump = rules.model_dump(mode="json")
    assert (dump["operations"], dump["blends"], dump["alpha_curves"]) == (["wait", "germinate"], ["gate"], ["cosine"])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"operations": ["germinate"]}, "must contain 'wait'"),
        ({"operations": ["wait", "grow"]}, "'grow' is not one of wait, germinate"),
        ({"tempos": [4]}, "4 is not one of 3, 5, 8"),
        ({"alpha_targets": [0.6]}, "0.6 is not one of 0.5, 0.7, 1.0"),
        ({"alpha_speeds": [1]}, "1 is not one of 0, 3, 5, 8"),
        ({"alpha_curves": []}, "at least 1 item"),
        ({"cooldown": [1, 0, 1]}, "greater than or equal to 1"),
        ({"harm_tolerance": -1}, "greater than or equal to 0"),
        ({"harm_tolerance": float("nan")}, "finite number"),
        ({"embargo": 3}, "Extra inputs"),
        ({"operations": ["wait", "germinate", "set_alpha"]}, "set_alpha is never legal, because 1 is the only alpha"),
    ],
)
def test_impossible_rules_are_refused(choices: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rules.model_validate(choices)


def test_rules_are_narrowed_to_choices_that_are_known() -> None:
    assert OPEN_RULES.narrow(Rules()) == Rules()
    assert OPEN_RULES.narrow(OPEN_RULES) is OPEN_RULES
    assert Rules().narrow(OPEN_RULES) == Rules()


def test_of_a_kind_without_a_known_choice_all_stay() -> None:
    assert Rules(tempos=(5, 8)).narrow(Rules(tempos=(3,))).tempos == (5, 8)


def test_training_in_isolation_can_always_be_ended() -> None:
    alone = open_rules(isolation=Isolation.SHADOW)
    assert Op.ADVANCE in alone.narrow(Rules()).operations


# Tables and measurements as structs of arrays.


def grown() -> SeedTable:
    """Two environments with seeds in different stages."""
    one = play(SeedTable.dormant(1, 2), DEFAULT, make_action(Op.GERMINATE), make_wait_actions(1)[0]).table
    return one.rows([0, 0])


def test_properties_answer_by_stage() -> None:
    table = SeedTable.dormant(1, len(Stage))
    table.stage[0] = list(Stage)
    for property_values, group in ((table.live, LIVE), (table.owning, OWNING), (table.blended, BLENDED)):
        assert property_values[0].tolist() == [stage in group for stage in Stage]


def test_dormant_slots_hold_nothing() -> None:
    table = SeedTable.dormant(3, 2)
    assert (table.environments, table.slots) == (3, 2)
    assert (table.blueprint == NO_BLUEPRINT).all()
    for field in fields(SeedTable):
        values = getattr(table, field.name)
        assert values.shape == (3, 2)
        if field.name != "blueprint":
            assert not values.any()


@pytest.mark.parametrize("rows", [np.array([1]), np.array([False, True]), slice(1, 2)])
def test_rows_take_indices_masks_and_slices_and_reset_a_mask(rows: np.ndarray) -> None:
    table = grown()
    before = table.copy()
    reset = table.reset(np.array([False, True]))
    for field in fields(SeedTable):
        ours = getattr(table, field.name)
        assert np.array_equal(getattr(table.rows(rows), field.name), ours[1:])
        assert np.array_equal(getattr(reset, field.name)[0], ours[0])
        assert np.array_equal(getattr(reset, field.name)[1:], getattr(SeedTable.dormant(1, 2), field.name))
        assert np.array_equal(ours, getattr(before, field.name)), "the table itself is left as it is"
        assert getattr(reset, field.name).dtype == ours.dtype


# Each gate lets a seed pass for the right reason.


RULES = open_rules(min_training_steps=3, measurement_max_age=2, harm_tolerance=0.5)


def slot(stage: Stage, **values: float) -> SeedTable:
    """One slot in a stage, with some values set."""
    table = SeedTable.dormant(1, 1)
    table.stage[:] = stage
    for name, value in values.items():
        getattr(table, name)[:] = value
    return table


def seen(**values: float):
    """Good measurements with some values replaced."""
    measurements = good_measurements()
    arrays = {name: np.full((1, 1), value, getattr(measurements, name).dtype) for name, value in values.items()}
    return replace(measurements, **arrays)


OPEN, BAD = Reason.PASSED, {"probed": False, "gradient_healthy": False, "contribution": -1.0}
GATED = (
    (Stage.GERMINATED, {}, {}, OPEN),
    (Stage.GERMINATED, {}, BAD, Reason.NOT_PROBED),
    (Stage.TRAINING, {"stage_age": 3}, {}, OPEN),
    (Stage.TRAINING, {"stage_age": 9}, {}, OPEN),
    (Stage.TRAINING, {"stage_age": 2}, {}, Reason.TOO_YOUNG),
    (Stage.TRAINING, {"stage_age": 2}, BAD, Reason.TOO_YOUNG),
    (Stage.TRAINING, {"stage_age": 3}, BAD, Reason.GRADIENT_UNHEALTHY),
    (Stage.BLENDING, {"alpha_elapsed": 3, "alpha_duration": 3}, BAD, OPEN),
    (Stage.BLENDING, {"alpha_elapsed": 2, "alpha_duration": 3}, {}, Reason.ALPHA_MOVING),
    (Stage.HOLDING, {}, {"contribution": 0.0}, OPEN),
    (Stage.HOLDING, {}, {"contribution": -0.5, "contribution_age": 2}, OPEN),
    (Stage.HOLDING, {}, {"contribution": -0.51}, Reason.HARMFUL),
    (Stage.HOLDING, {}, {"contribution": 1.0, "contribution_age": 3}, Reason.STALE),
    (Stage.HOLDING, {}, {"contribution": -1.0, "contribution_age": 3}, Reason.STALE),
    (Stage.HOLDING, {}, {"contribution": np.nan}, Reason.NOT_MEASURED),
    (Stage.HOLDING, {}, {"contribution": np.nan, "contribution_age": 9}, Reason.NOT_MEASURED),
    *((stage, {"stage_age": 9}, {}, Reason.NO_GATE) for stage in Stage if stage not in GATES),
)
"""A stage, values of its slot, what is measured of it, and what its gate says."""


@pytest.mark.parametrize(("stage", "values", "measurements", "reason"), GATED)
def test_a_gate_gives_its_reason(
    stage: Stage, values: dict[str, float], measurements: dict[str, float], reason: Reason
) -> None:
    found = evaluate_gates(slot(stage, **values), seen(**measurements), RULES)
    assert found[0, 0] == reason


@pytest.mark.parametrize(("elapsed", "legal"), [(3, True), (2, False)])
def test_a_held_seed_whose_alpha_moves_is_not_fossilized(elapsed: int, legal: bool) -> None:
    table = slot(Stage.HOLDING, alpha_elapsed=elapsed, alpha_duration=3)
    masks = legal_actions(table, good_measurements(), RULES, np.ones((1, 1, 1), np.bool_))
    assert masks.slot[0, Op.FOSSILIZE, 0] == legal


# The factored action and its builder; a number per head, given together or one by one.


def test_each_operation_reads_its_heads() -> None:
    read = {op.name: [head.name for head in Head if RELEVANT[op, head] and head is not Head.OP] for op in Op}
    assert read == {
        "WAIT": [],
        "GERMINATE": ["SLOT", "BLUEPRINT", "BLEND", "TEMPO", "ALPHA_TARGET"],
        "ADVANCE": ["SLOT"],
        "SET_ALPHA": ["SLOT", "ALPHA_TARGET", "ALPHA_SPEED", "ALPHA_CURVE"],
        "FOSSILIZE": ["SLOT"],
        "PRUNE": ["SLOT", "ALPHA_SPEED", "ALPHA_CURVE"],
    }
    assert RELEVANT[:, Head.OP].all()


def test_the_builder_takes_values_and_stores_indices() -> None:
    chosen = make_action(Op.SET_ALPHA, 2, alpha_target=0.7, alpha_speed=8, alpha_curve=Curve.SIGMOID)
    assert chosen.tolist() == [Op.SET_ALPHA, 2, 0, 0, 0, 1, 3, 2]
    assert chosen.dtype == np.int64
    germination = make_action(Op.GERMINATE, 1, 3, blend=Blend.MULTIPLY, tempo=8, alpha_target=0.5)
    assert germination.tolist() == [Op.GERMINATE, 1, 3, 2, 2, 0, 0, 0]


def test_the_builder_leaves_out_what_the_operation_does_not_read() -> None:
    left_out = make_action(Op.FOSSILIZE, 1, blueprint=3, tempo=8, alpha_speed=5)
    assert left_out.tolist() == [Op.FOSSILIZE, 1, *[0] * 6]
    assert make_action(Op.GERMINATE, 1, 3).tolist() == [Op.GERMINATE, 1, 3, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("value", [{"tempo": 4}, {"alpha_target": 0.6}, {"alpha_speed": 1}])
def test_the_builder_refuses_values_that_are_not_on_offer(value: dict[str, float]) -> None:
    with pytest.raises(IllegalActionError, match=f"{next(iter(value))} .* is not on offer, choose one of"):
        make_action(Op.GERMINATE, **value)


def test_canonical_zeroes_irrelevant_heads_only() -> None:
    rows = np.full((len(Op), len(Head)), 2, dtype=np.int64)
    rows[:, Head.OP] = list(Op)
    expected = np.where(RELEVANT, rows, 0)
    assert np.array_equal(clear_irrelevant_heads(rows), expected)
    assert rows[Op.WAIT, Head.SLOT] == 2, "the argument is left as it is"


@pytest.mark.parametrize("op", [-1, 6])
def test_canonical_refuses_unknown_operations(op: int) -> None:
    rows = make_wait_actions(3)
    rows[2, Head.OP] = op
    with pytest.raises(IllegalActionError, match=f"environment 2: operation {op} is unknown"):
        clear_irrelevant_heads(rows)


NAMES = [head.name.lower() for head in Head]
DIFFERENT = PerHead(**{name: float(index) for index, name in enumerate(NAMES)})


class Holder(Settings):
    numbers: PerHead = DIFFERENT


def test_numbers_come_in_the_order_of_heads() -> None:
    assert DIFFERENT.by_head == tuple(map(float, range(len(Head))))
    for head in Head:
        assert DIFFERENT.by_head[head] == getattr(DIFFERENT, head.name.lower())


@pytest.mark.parametrize("number", [0, 0.02, "1e-3"])
def test_one_number_stands_for_all_heads(number: object) -> None:
    assert PerHead.model_validate(number) == PerHead(**dict.fromkeys(NAMES, float(number)))
    assert PerHead.model_validate(number) == PerHead.fill(float(number))


@pytest.mark.parametrize("head", NAMES)
def test_heads_that_are_not_named_keep_their_default(head: str) -> None:
    found = Holder.model_validate({"numbers": {head: 9.0}})
    assert found.numbers == DIFFERENT.model_copy(update={head: 9.0})


@pytest.mark.parametrize("given", [-0.1, float("nan"), float("inf"), "much", None, [0.1] * 8, {"op": 0.1}])
def test_what_is_no_number_per_head_is_refused(given: object) -> None:
    with pytest.raises(ValidationError):
        PerHead.model_validate(given)
