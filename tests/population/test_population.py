"""Parameters, optimizer state and the lifecycle's table are one thing: after every call, successful or failed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from esper.errors import ConfigError, IllegalActionError, SlotError, UnknownBlueprintError
from esper.growth.blueprints.registry import get
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.stages import Stage
from esper.population import learning
from esper.population.parameters import SeedKind
from esper.population.population import Population, PopulationConfig
from open_rules import open_rules
from population.scenes import (
    SUITE,
    Draws,
    advance,
    assert_aligned,
    assert_same_state,
    good_evidence,
    instances,
    networks,
    plan,
    state_of,
    uncertain_evidence,
)

MLP, TOKEN_CONV = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("token_conv")
QUICK = open_rules(cooldown=(1, 1, 1), min_training_steps=1)


def population(count: int, rules: Rules = QUICK) -> Population:
    return Population(plan(rules), networks(instances(count)))


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.few(1)
def test_rows_are_the_live_seeds_after_every_transition(isolation: Isolation) -> None:
    chosen = instances(10)
    fast = Population(plan(QUICK.model_copy(update={"isolation": isolation})), networks(chosen))
    draws, rng = Draws(chosen), np.random.default_rng(0)
    seen: set[tuple[int, int]] = set()
    for step in range(80):
        if step == 40:  # all but two have fossilized what they could: go on with new networks
            fast.replace(np.arange(8), networks(instances(18)[10:]))
            assert_aligned(fast)
        fast.evidence = uncertain_evidence(fast, rng)
        changes = fast.decide(draws.actions(fast.legal_actions())).transitions
        seen |= set(zip(changes.before.tolist(), changes.after.tolist(), strict=True))
        assert_aligned(fast)
    assert (Stage.DORMANT, Stage.GERMINATED) in seen
    assert (Stage.GERMINATED, Stage.PRUNED) in seen
    assert (Stage.HOLDING, Stage.FOSSILIZED) in seen
    assert (Stage.RESETTING, Stage.DORMANT) in seen


def test_a_seed_keeps_its_moments_when_others_come_and_go_and_when_it_fossilizes() -> None:
    chosen = instances(3)
    fast, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    advance(fast, draws, np.stack([make_action(Op.GERMINATE, 1, MLP)] * 3))
    for _ in range(4):
        advance(fast, draws, make_wait_actions(3))
    before = state_of(fast, 1)
    fast.evidence = good_evidence(fast)
    fast.decide(np.stack([make_action(Op.PRUNE, 1), make_action(Op.FOSSILIZE, 1), make_action(Op.GERMINATE, 0, MLP)]))
    after = state_of(fast, 1)
    names = [name for name in before if name.startswith("seed.")]
    assert names
    assert all(torch.equal(after[name], before[name]) for name in names)
    assert after[f"seed.1.{MLP}.mean"].any()
    assert after[f"seed.1.{MLP}.steps"] == 8  # two batches in each of the four steps after GERMINATED
    assert fast.table.stage[:, 1].tolist() == [Stage.PRUNED, Stage.FOSSILIZED, Stage.HOLDING]


def test_a_blueprint_that_fails_to_build_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = instances(3)
    fast, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    advance(fast, draws, np.stack([make_action(Op.GERMINATE, 2, MLP)] * 3))
    advance(fast, draws, make_wait_actions(3))
    before = [state_of(fast, network) for network in range(3)]
    actions = np.stack(
        [make_action(Op.PRUNE, 2), make_action(Op.GERMINATE, 0, MLP), make_action(Op.GERMINATE, 0, TOKEN_CONV)]
    )

    def broken(*arguments: object) -> None:
        raise SlotError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(get("token_conv"), "__init__", broken)
        with pytest.raises(SlotError, match="out of order"):
            fast.decide(actions)
    for network in range(3):
        assert_same_state(state_of(fast, network), before[network])
    assert_aligned(fast)
    fast.decide(actions)
    assert fast.table.stage[:, [0, 2]].tolist() == [
        [Stage.DORMANT, Stage.PRUNED],
        [Stage.GERMINATED, Stage.BLENDING],
        [Stage.GERMINATED, Stage.BLENDING],
    ]
    assert_aligned(fast)


def test_an_illegal_action_leaves_everything_as_it_was() -> None:
    fast = population(2)
    before = [state_of(fast, network) for network in range(2)]
    with pytest.raises(IllegalActionError, match="environment 1, slot 0"):
        fast.decide(np.stack([make_action(Op.GERMINATE, 0, MLP), make_action(Op.PRUNE, 0)]))
    for network in range(2):
        assert_same_state(state_of(fast, network), before[network])


def test_a_second_seed_in_a_slot_starts_from_other_weights() -> None:
    fast = population(1)
    first: list[torch.Tensor] = []
    for _ in range(2):
        fast.evidence = good_evidence(fast)
        fast.decide(make_action(Op.GERMINATE, 0, MLP)[None])
        first.append(fast.banks[SeedKind(0, MLP)].block.values.detach()[0].clone())
        fast.decide(make_action(Op.PRUNE, 0)[None])
        for _ in range(3):
            fast.decide(make_wait_actions(1))
    assert fast.germinations[0].tolist() == [2, 0, 0]
    assert not torch.equal(first[0], first[1])


def test_replace_puts_new_networks_in_and_leaves_the_others_untouched() -> None:
    chosen, newcomers = instances(5), instances(9)[5:7]
    fast, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    for _ in range(6):
        advance(fast, draws, draws.actions(fast.legal_actions()))
    before = [state_of(fast, network) for network in range(5)]
    fast.replace(np.array([3, 1]), networks(newcomers))
    for network in (0, 2, 4):
        assert_same_state(state_of(fast, network), before[network])
    fresh = Population(plan(QUICK), networks(newcomers))
    for place, network in enumerate((3, 1)):
        assert_same_state(state_of(fast, network), state_of(fresh, place))
        assert fast.specs.widths[network].tolist() == list(newcomers[place].widths)
        assert fast.specs.learning_rates[network] == newcomers[place].learning_rate
        assert fast.host_parameters[network] == SUITE.parameters(newcomers[place])
        costs, expected = fast.specs.costs.parameters, fresh.specs.costs.parameters
        assert (costs.blueprints[network] == expected.blueprints[place]).all()
        assert (costs.blends[network] == expected.blends[place]).all()
    assert_aligned(fast)


def test_parameters_are_counted_at_the_live_width() -> None:
    chosen = [one for one in instances(14) if one.widths == (2, 10, 10)][:1]
    fast = Population(plan(QUICK), networks(chosen))
    fast.decide(make_action(Op.GERMINATE, 0, MLP)[None])
    fast.evidence = good_evidence(fast)
    fast.decide(make_action(Op.GERMINATE, 1, TOKEN_CONV)[None])
    narrow, wide = (get(name).parameters_at(site) for name, site in [
        ("mlp", fast.execution.sites[0].with_width(2)), ("token_conv", fast.execution.sites[1])
    ])  # fmt: skip
    everywhere = np.ones((1, 3), np.bool_)
    assert fast.count_seed_parameters(everywhere).tolist() == [narrow + wide]
    assert fast.count_seed_parameters(fast.table.blended).tolist() == [narrow]
    assert fast.count_seed_parameters(~everywhere).tolist() == [0]


def test_names_that_do_not_exist_are_refused() -> None:
    chosen = networks(instances(1))
    with pytest.raises(SlotError, match="no submodule 'layer9'"):
        Population(replace(plan(QUICK), slots=("layer9",)), chosen)
    with pytest.raises(UnknownBlueprintError, match="unknown blueprint 'mpl'"):
        Population(replace(plan(QUICK), blueprints=("mpl",)), chosen)


@pytest.mark.parametrize("minibatches", [1, 7])
def test_a_decision_prepares_its_program_once_however_many_minibatches(
    minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Population] = []

    def counted(fast: Population, *more: Any) -> Any:
        prepared.append(fast)
        return original(fast, *more)

    original = learning.prepare_forward
    monkeypatch.setattr(learning, "prepare_forward", counted)
    chosen = instances(3)
    fast, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    learning.train(fast, [draws.batch() for _ in range(minibatches)])
    assert prepared == [fast]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_types_in_which_steps_cannot_be_counted_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"dtype is torch\.\w+: choose torch\.float32 or torch\.float64"):
        PopulationConfig(nn.Linear(2, 2), (), (), torch.zeros(1, 2), dtype=dtype)
