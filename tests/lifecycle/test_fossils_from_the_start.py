"""Networks may start with finished seeds: sound, permanent, and refused where they cannot live."""

from __future__ import annotations

import numpy as np
import pytest

from esper.errors import IllegalActionError
from esper.lifecycle.actions import Blend, make_wait_actions
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import Cause, add_fossils, step
from lifecycle.soundness import assert_sound
from open_rules import open_rules

RULES = open_rules()
COMPATIBLE = np.ones((2, 3, 2), np.bool_)
GIVEN = np.array([[1, -1, 0], [-1, -1, -1]])
BLENDS = np.array([[Blend.GATE, Blend.ADD, Blend.MULTIPLY], [Blend.ADD] * 3])


def test_fossils_count_fully_from_the_start_and_stay() -> None:
    table, changes = add_fossils(SeedTable.dormant(2, 3), GIVEN, BLENDS, COMPATIBLE)
    assert_sound(table, RULES)
    assert (table.stage == Stage.FOSSILIZED).tolist() == (GIVEN >= 0).tolist()
    assert table.blueprint.tolist() == GIVEN.tolist()
    assert table.blend.tolist() == BLENDS.tolist()
    assert changes.blend.tolist() == [Blend.GATE, Blend.MULTIPLY]
    assert table.alpha.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert [(env, slot) for env, slot in zip(changes.env, changes.slot, strict=True)] == [(0, 0), (0, 2)]
    assert changes.born.all()
    assert set(changes.cause.tolist()) == {Cause.START}
    for _ in range(3):
        after = step(table, Evidence.none(2, 3), make_wait_actions(2), RULES, COMPATIBLE)
        assert len(after.transitions) == 0
        assert_sound(after.table, RULES)
        assert after.table.alpha.tolist() == table.alpha.tolist()
        table = after.table


def test_nothing_given_changes_nothing() -> None:
    before = SeedTable.dormant(2, 3)
    table, changes = add_fossils(before, np.full((2, 3), -1), BLENDS, COMPATIBLE)
    assert len(changes) == 0
    assert all(np.array_equal(vars(table)[name], value) for name, value in vars(before).items())


def test_the_given_table_is_left_as_it_is() -> None:
    before = SeedTable.dormant(2, 3)
    add_fossils(before, GIVEN, BLENDS, COMPATIBLE)
    assert not before.owning.any()


def test_slots_that_are_taken_or_do_not_suit_are_refused() -> None:
    taken, _ = add_fossils(SeedTable.dormant(2, 3), GIVEN, BLENDS, COMPATIBLE)
    with pytest.raises(
        IllegalActionError, match=r"network 0 .* slot 0, which is in stage FOSSILIZED: choose a dormant"
    ):
        add_fossils(taken, GIVEN, BLENDS, COMPATIBLE)
    unfit = COMPATIBLE.copy()
    unfit[0, 2, 0] = False
    with pytest.raises(IllegalActionError, match="network 0 cannot start with blueprint 0 in slot 2"):
        add_fossils(SeedTable.dormant(2, 3), GIVEN, BLENDS, unfit)
