"""Tables and evidence as structs of arrays."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.stages import BLENDED, COOLDOWN, LIVE, OWNING, Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from lifecycle.support import DEFAULT, play


def grown() -> SeedTable:
    """Two environments with seeds in different stages."""
    one = play(SeedTable.dormant(1, 2), DEFAULT, make_action(Op.GERMINATE), make_wait_actions(1)[0]).table
    return one.rows([0, 0])


def test_stages_are_grouped() -> None:
    assert [stage.name for stage in LIVE] == ["GERMINATED", "TRAINING", "BLENDING", "HOLDING"]
    assert set(OWNING) - set(LIVE) == {Stage.FOSSILIZED}
    assert set(BLENDED) < set(OWNING)
    assert {Stage.DORMANT, *OWNING, *COOLDOWN} == set(Stage)


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


def test_without_evidence_nothing_is_known() -> None:
    evidence = Evidence.none(2, 3)
    assert not evidence.probed.any()
    assert not evidence.gradient_healthy.any()
    assert np.isnan(evidence.contribution).all()
    assert evidence.contribution_age.shape == (2, 3)
