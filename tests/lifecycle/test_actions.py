"""The factored action and its builder; a number per head, given together or one by one."""

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
    count_choices,
    make_action,
    make_wait_actions,
)


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


def test_head_sizes_follow_the_heads() -> None:
    assert count_choices(slots=3, blueprints=7) == (6, 3, 7, 3, 3, 3, 4, 3)


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


def test_wait_is_all_zeros() -> None:
    assert np.array_equal(make_wait_actions(4), np.zeros((4, 8)))


NAMES = [head.name.lower() for head in Head]
DIFFERENT = PerHead(**{name: float(index) for index, name in enumerate(NAMES)})


class Holder(Settings):
    numbers: PerHead = DIFFERENT


def test_there_is_a_field_for_each_head_and_no_other() -> None:
    assert list(PerHead.model_fields) == NAMES


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


def test_a_number_leaves_no_head_at_its_default() -> None:
    assert Holder.model_validate({"numbers": 9.0}).numbers == PerHead.fill(9.0)


@pytest.mark.parametrize("given", [-0.1, float("nan"), float("inf"), "much", None, [0.1] * 8, {"op": 0.1}])
def test_what_is_no_number_per_head_is_refused(given: object) -> None:
    with pytest.raises(ValidationError):
        PerHead.model_validate(given)
