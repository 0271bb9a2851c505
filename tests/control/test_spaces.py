"""Masks as tensors say what the lifecycle's masks say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.control.policy.masking import legal_choices
from esper.control.spaces import mask_tensors
from esper.lifecycle.actions import RELEVANT, Head
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.table import SeedTable
from esper.lifecycle.transitions import step
from lifecycle.support import RULE_SETS, random_compatibility, random_evidence, sample

E, S, K, STEPS = 40, 3, 4, 25


@pytest.mark.parametrize("rules", RULE_SETS.values(), ids=RULE_SETS.keys())
def test_every_conditional_mask_is_the_lifecycle_s(rules) -> None:
    rng = np.random.default_rng(0)
    compatible = random_compatibility(E, S, K, rng)
    table, relevant = SeedTable.dormant(E, S), torch.from_numpy(RELEVANT)
    ops: set[int] = set()
    for _ in range(STEPS):
        evidence = random_evidence(E, S, rng)
        masks = legal_actions(table, evidence, rules, compatible)
        tensors = mask_tensors(masks, torch.device("cpu"))
        assert all(tensor.dtype == torch.bool for tensor in tensors)
        actions = sample(masks, rng)
        op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
        ops |= set(op.tolist())
        for head in Head:
            expected = masks.given(head, op, slot)
            actual = legal_choices(tensors, head, torch.from_numpy(op), torch.from_numpy(slot), relevant[op])
            assert np.array_equal(actual.numpy(), expected), head.name
        table = step(table, evidence, actions, rules, compatible).table
    assert len(ops) >= 4
