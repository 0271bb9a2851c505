"""A number per head: named as the heads are, in their order, and given together or one by one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from esper.lifecycle.actions import Head
from esper.lifecycle.per_head import PerHead
from esper.settings import Settings

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
    assert PerHead.model_validate(number) == PerHead.every(float(number))


@pytest.mark.parametrize("head", NAMES)
def test_heads_that_are_not_named_keep_their_default(head: str) -> None:
    found = Holder.model_validate({"numbers": {head: 9.0}})
    assert found.numbers == DIFFERENT.model_copy(update={head: 9.0})


def test_a_number_leaves_no_head_at_its_default() -> None:
    assert Holder.model_validate({"numbers": 9.0}).numbers == PerHead.every(9.0)


@pytest.mark.parametrize("given", [-0.1, float("nan"), float("inf"), "much", None, [0.1] * 8, {"op": 0.1}])
def test_what_is_no_number_per_head_is_refused(given: object) -> None:
    with pytest.raises(ValidationError):
        PerHead.model_validate(given)
