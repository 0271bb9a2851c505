"""The policy plays the real lifecycle and never makes an illegal move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from control.synthetic import SMALL, observations, policy, uniforms
from esper.engine.observation import make_mask_tensors
from esper.errors import IllegalActionError
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.rules import Isolation
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import step
from open_rules import open_rules

ENVIRONMENTS, STEPS, SLOTS, BLUEPRINTS = 1000, 50, 3, 4


def evidence(random: np.random.Generator) -> Evidence:
    shape = (ENVIRONMENTS, SLOTS)
    return replace(
        Evidence.none(*shape),
        probed=np.ones(shape, np.bool_),
        gradient_healthy=random.random(shape) < 0.8,
        contribution=random.normal(size=shape).astype(np.float32),
        contribution_age=random.integers(0, 4, shape).astype(np.int16),
    )


@pytest.mark.parametrize("isolation", list(Isolation))
def test_no_illegal_action_in_fifty_thousand_decisions(isolation: Isolation) -> None:
    random = np.random.default_rng(0)
    actor = policy(SMALL.model_copy(update={"head_gain": 1.0}))
    rules = open_rules(isolation=isolation, cooldown=(1, 1, 1))
    compatible = random.random((ENVIRONMENTS, SLOTS, BLUEPRINTS)) < 0.5
    table, state, used = SeedTable.dormant(ENVIRONMENTS, SLOTS), actor.initial_state(ENVIRONMENTS), set[int]()
    for t in range(STEPS):
        seen, measured = observations((ENVIRONMENTS,), SLOTS, BLUEPRINTS, seed=t), evidence(random)
        legality = make_mask_tensors(legal_actions(table, measured, rules, compatible), torch.device("cpu"))
        decision = actor.act(seen, legality, state, uniforms((ENVIRONMENTS,), seed=t))
        actions, state = decision.actions.numpy(), decision.state
        table = step(table, measured, actions, rules, compatible).table  # raises if one of them is illegal
        used.update(actions[:, Head.OP].tolist())
    possible = set(Op) - ({Op.ADVANCE} if isolation is Isolation.NONE else set())
    assert used == possible
    assert (table.stage == Stage.FOSSILIZED).any()


def test_a_policy_shown_wrong_masks_does_make_illegal_actions() -> None:
    actor, rules = policy(), open_rules()
    empty = SeedTable.dormant(ENVIRONMENTS, SLOTS)
    nothing = Evidence.none(ENVIRONMENTS, SLOTS)
    everywhere = np.ones((ENVIRONMENTS, SLOTS, BLUEPRINTS), np.bool_)
    masks = make_mask_tensors(legal_actions(empty, nothing, rules, everywhere), torch.device("cpu"))
    wrong = masks._replace(op=torch.ones_like(masks.op))
    seen = observations((ENVIRONMENTS,), SLOTS, BLUEPRINTS)
    actions = actor.act(seen, wrong, actor.initial_state(ENVIRONMENTS), uniforms((ENVIRONMENTS,))).actions
    with pytest.raises(IllegalActionError):
        step(empty, nothing, actions.numpy(), rules, everywhere)
