"""A hundred slots: what is legal in each is what would be legal if it were the only one."""

from __future__ import annotations

import numpy as np
import pytest

from esper.lifecycle.actions import Op
from esper.lifecycle.legality import legal_actions, require_legal
from esper.lifecycle.stages import Stage
from lifecycle.one_slot import ALONE, all_together, lived, together
from lifecycle.support import RULE_SETS, random_compatibility, random_evidence, sample

BLUEPRINTS = 5


@pytest.mark.parametrize("name", ["default-none", "wide-shadow", "narrow-shadow", "one_target-none"])
def test_masks_are_those_of_every_slot_by_itself(name: str) -> None:
    rules, generator = RULE_SETS[name], np.random.default_rng(3)
    compatible = random_compatibility(ALONE, 1, BLUEPRINTS, generator)
    table, evidence = lived(rules, compatible, generator), random_evidence(ALONE, 1, generator)
    assert len(set(table.stage.ravel().tolist())) >= len(Stage) - 2, "the walk was too short to test every stage"
    alone = legal_actions(table, evidence, rules, compatible)
    masks = legal_actions(all_together(table), all_together(evidence), rules, together(compatible))
    for op in set(Op) - {Op.WAIT}:  # which reads no slot
        slots = together(alone.slot[:, op])
        np.testing.assert_array_equal(masks.slot[:, op], slots)
        np.testing.assert_array_equal(masks.op[:, op], slots.any(1))
    np.testing.assert_array_equal(masks.blueprint, together(alone.blueprint))
    np.testing.assert_array_equal(masks.alpha_target, together(alone.alpha_target))
    for _ in range(20):
        require_legal(sample(masks, generator), masks)
