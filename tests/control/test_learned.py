"""A policy as controller: greedy or sampled, what it decides for a network does not depend on the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.control.learned import LearnedController
from esper.control.policy import Policy, PolicySettings
from esper.engine.observation import Observation, list_features
from esper.lifecycle.actions import ALPHA_TARGETS, TEMPOS, Blend, Head, Op
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.rules import Rules
from open_rules import open_rules
from rl.short import SUITE, episodes, instances

SEEDS = (11, 12, 13, 14, 15)
# Large heads, so that choices are far from ties.
SETTINGS = PolicySettings(advice=None, hidden=24, width=16, head_gain=1.0)


def policy() -> Policy:
    return Policy(list_features(False).spec, SETTINGS, torch.Generator().manual_seed(0))


def rows(observation: Observation, masks: ActionMasks, chosen: list[int]) -> tuple[Observation, ActionMasks]:
    own = ActionMasks(**{name: value if name == "grounds" else value[chosen] for name, value in vars(masks).items()})
    return Observation(*(part[chosen] for part in observation)), own


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_decisions_do_not_depend_on_who_else_is_there(greedy: bool) -> None:
    running = episodes(instances(len(SEEDS)))
    companies = [[0, 1, 2, 3, 4], [2], [3, 2]]
    controllers = [LearnedController(policy(), greedy=greedy) for _ in companies]
    states = [one.start([SEEDS[row] for row in chosen]) for one, chosen in zip(controllers, companies, strict=True)]
    ops: set[int] = set()
    for _ in range(SUITE.steps):
        observation, masks = running.observe(), running.legal_actions()
        decided: list[np.ndarray] = []
        for index, chosen in enumerate(companies):
            actions, states[index] = controllers[index].act(*rows(observation, masks, chosen), states[index])
            decided.append(actions)
        followed = [actions[chosen.index(2)].tolist() for actions, chosen in zip(decided, companies, strict=True)]
        assert followed[1] == followed[0] == followed[2]
        running.step(decided[0])
        ops |= set(decided[0][:, Head.OP].tolist())
    assert greedy or len(ops) >= 4, "the test means to follow networks that grow"


def test_the_greedy_controller_needs_no_seed_and_the_sampled_one_follows_it() -> None:
    running = episodes(instances(4))
    observation, masks = running.observe(), running.legal_actions()

    def first(greedy: bool, seed: int) -> list[list[int]]:
        controller = LearnedController(policy(), greedy=greedy)
        return controller.act(observation, masks, controller.start([seed] * 4))[0].tolist()

    assert first(True, 0) == first(True, 1)
    assert first(False, 0) == first(False, 0)
    assert len({str(first(False, seed)) for seed in range(6)}) > 1


def test_it_remembers() -> None:
    running = episodes(instances(3))
    observation, masks = running.observe(), running.legal_actions()
    controller = LearnedController(policy(), greedy=True)
    state = controller.start(range(3))
    assert not state.memory.output.any()
    _, state = controller.act(observation, masks, state)
    assert state.memory.output.any()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_under_open_rules_it_takes_only_choices_that_it_learned_with(greedy: bool) -> None:
    chosen: dict[bool, set[tuple[int, ...]]] = {}
    heads = [Head.BLEND, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE]
    for keeps in (True, False):
        running = episodes(instances(4), rules=open_rules(blends=tuple(Blend)))
        controller = LearnedController(policy(), greedy=greedy, rules=Rules() if keeps else None)
        state = controller.start(range(4))
        found = chosen.setdefault(keeps, set())
        for _ in range(SUITE.steps):
            actions, state = controller.act(running.observe(), running.legal_actions(), state)
            found |= {tuple(row[heads]) for row in actions if row[Head.OP] == Op.GERMINATE}
            assert not keeps or {Op(op) for op in actions[:, Head.OP]} <= set(Rules().operations)
            running.step(actions)
    (only,) = chosen[True]
    assert only == (Blend.ADD, TEMPOS.index(3), ALPHA_TARGETS.index(1.0), 0, 0)
    assert len(chosen[False] | chosen[True]) > 1
