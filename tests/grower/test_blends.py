"""A grower counts what blends cost, and a new alpha leaves a seed as it was blended."""

from typing import Any

import numpy as np
import pytest

from esper.control.controller import Actions
from esper.control.rules import Planting, Schedule
from esper.engine.budget import Budget
from esper.engine.engine import GrowthConfig
from esper.engine.observation import Observation
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import ALPHA_TARGETS, Blend, Head, Op, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Rules
from factories import Loop, make_growing

every_blend = pytest.mark.parametrize("blend", Blend)
CAP = 1000
CAPPED = GrowthConfig(budget=Budget(parameters=CAP))


def rules(blend: Blend) -> Rules:
    return Rules(operations=tuple(Op), blends=(blend,), alpha_targets=ALPHA_TARGETS)


def parameters_of(model: GrowingModel) -> int:
    return sum(parameter.numel() for seed in model.seeds.values() for parameter in seed.parameters())


def assert_counted(loop: Loop) -> None:
    """Budget, rent and FLOPs are those of the modules that are there."""
    subject, everything = loop.grower.network, np.ones((1, 2), np.bool_)
    real, summary = parameters_of(loop.model), loop.model.summary()
    assert (subject.charge.added(subject.table, everything) * subject.host_parameters).tolist() == pytest.approx([real])
    assert subject.budget_left.tolist() == [1 - real / CAP]
    assert subject.specs.costs.flops.resident(subject.table).sum() == summary.flops
    assert summary.parameters == real


@every_blend
def test_budget_and_rent_count_what_the_model_really_has(blend: Blend) -> None:
    planting = Schedule([Planting(0, 0, 0), Planting(1, 1, 2)], 20)
    loop = Loop(planting, rules=rules(blend), growth=CAPPED)
    for _ in range(4):
        loop.epoch()
        assert_counted(loop)
    assert {seed.blend for seed in loop.model.seeds.values()} == {blend}
    assert len(loop.model.seeds) == 2


@every_blend
def test_fossils_from_before_are_counted_with_their_blend(blend: Blend) -> None:
    model = make_growing()
    model.slots["0"].germinate("mlp", blend=blend, alpha=1.0)
    model.slots["0"].fossilize()
    loop = Loop("none", model, growth=CAPPED)
    assert_counted(loop)
    loop.epoch()
    assert_counted(loop)


class Retargeting:
    """Plants one seed, and asks for another alpha whenever that is legal."""

    name = "retargeting"

    def start(self, seeds: Any) -> int:
        return 0

    def act(self, observation: Observation, masks: ActionMasks, state: int) -> tuple[Actions, int]:
        actions = make_wait_actions(1)
        if masks.slot[0, Op.SET_ALPHA, 0]:
            actions[0, Head.OP] = Op.SET_ALPHA
            actions[0, Head.ALPHA_TARGET] = masks.alpha_target[0, 0].argmax()
            state += 1
        elif masks.slot[0, Op.GERMINATE, 0]:
            actions[0, Head.OP] = Op.GERMINATE
            actions[0, Head.BLEND] = masks.blend[0].argmax()
        return actions, state


@every_blend
def test_a_new_alpha_leaves_a_seed_its_blend_its_parameters_and_their_moments(blend: Blend) -> None:
    loop = Loop(Retargeting(), rules=rules(blend), growth=CAPPED)
    loop.epoch()
    seed = loop.model.seeds["0"]
    parameters = list(seed.parameters())
    for _ in range(6):
        loop.epoch()
        assert loop.model.seeds["0"] is seed
        assert all(one is other for one, other in zip(seed.parameters(), parameters, strict=True))
        assert loop.grower.network.table.blend[0, 0] == seed.blend == blend
        assert_counted(loop)
    assert loop.grower._controller_state >= 3, "the test means to see other alphas"
    assert all(loop.optimizer.state[parameter]["step"] >= 10 for parameter in parameters)
