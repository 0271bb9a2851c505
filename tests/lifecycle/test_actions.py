"""The factored action and its builder."""

from __future__ import annotations

import numpy as np
import pytest

from esper.errors import IllegalActionError
from esper.lifecycle.actions import RELEVANT, Blend, Curve, Head, Op, action, canonical, head_sizes, wait


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
    assert head_sizes(slots=3, blueprints=7) == (6, 3, 7, 3, 3, 3, 4, 3)


def test_the_builder_takes_values_and_stores_indices() -> None:
    chosen = action(Op.SET_ALPHA, 2, alpha_target=0.7, alpha_speed=8, alpha_curve=Curve.SIGMOID)
    assert chosen.tolist() == [Op.SET_ALPHA, 2, 0, 0, 0, 1, 3, 2]
    assert chosen.dtype == np.int64
    germination = action(Op.GERMINATE, 1, 3, blend=Blend.MULTIPLY, tempo=8, alpha_target=0.5)
    assert germination.tolist() == [Op.GERMINATE, 1, 3, 2, 2, 0, 0, 0]


def test_the_builder_leaves_out_what_the_operation_does_not_read() -> None:
    assert action(Op.FOSSILIZE, 1, blueprint=3, tempo=8, alpha_speed=5).tolist() == [Op.FOSSILIZE, 1, 0, 0, 0, 0, 0, 0]
    assert action(Op.GERMINATE, 1, 3).tolist() == [Op.GERMINATE, 1, 3, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("value", [{"tempo": 4}, {"alpha_target": 0.6}, {"alpha_speed": 1}])
def test_the_builder_refuses_values_that_are_not_on_offer(value: dict[str, float]) -> None:
    with pytest.raises(IllegalActionError, match=f"{next(iter(value))} .* is not on offer, choose one of"):
        action(Op.GERMINATE, **value)


def test_canonical_zeroes_irrelevant_heads_only() -> None:
    rows = np.full((len(Op), len(Head)), 2, dtype=np.int64)
    rows[:, Head.OP] = list(Op)
    expected = np.where(RELEVANT, rows, 0)
    assert np.array_equal(canonical(rows), expected)
    assert rows[Op.WAIT, Head.SLOT] == 2, "the argument is left as it is"


@pytest.mark.parametrize("op", [-1, 6])
def test_canonical_refuses_unknown_operations(op: int) -> None:
    rows = wait(3)
    rows[2, Head.OP] = op
    with pytest.raises(IllegalActionError, match=f"environment 2: operation {op} is unknown"):
        canonical(rows)


def test_wait_is_all_zeros() -> None:
    assert np.array_equal(wait(4), np.zeros((4, 8)))
