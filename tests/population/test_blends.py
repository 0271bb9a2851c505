"""Blends are real in populations: they compute, learn and cost what they do in single models, and differ."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from esper.engine.budget import Budget
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.population.evaluation import evaluate
from esper.population.learning import train
from esper.population.parameters import SeedKind
from esper.population.population import STRATEGIES, Population, Strategy
from population.scenes import (
    SUITE,
    VALIDATION,
    Draws,
    assert_aligned,
    good_evidence,
    grown,
    instances,
    networks,
    plan,
    state_of,
)

MLP = SUITE.blueprints.index("mlp")
SLOT, COUNT = 1, 3


def rules(isolation: Isolation = Isolation.NONE) -> Rules:
    return Rules(isolation=isolation, operations=tuple(Op), blends=tuple(Blend), alpha_targets=(0.5, 1.0))


def with_seeds(blend: Blend, isolation: Isolation = Isolation.NONE, strategy: Strategy = "stacked") -> Population:
    """All networks have the same kind of seed, which has learned for three decisions."""
    chosen = instances(COUNT)
    population, draws = Population(plan(rules(isolation), strategy=strategy), networks(chosen)), Draws(chosen)
    for actions in ([make_action(Op.GERMINATE, SLOT, MLP, blend=blend)] * COUNT, *[make_wait_actions(COUNT)] * 3):
        population.evidence = good_evidence(population)
        population.decide(np.stack(actions))
        train(population, [draws.batch() for _ in range(3)])
    return population


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isolation", list(Isolation))
def test_no_blend_is_computed_as_another(isolation: Isolation, strategy: Strategy) -> None:
    found = {blend: with_seeds(blend, isolation, strategy) for blend in Blend}
    held_back = Draws(instances(COUNT)).batch(VALIDATION)
    for one, other in combinations(found.values(), 2):
        ours, theirs = (evaluate(population, held_back) for population in (one, other))
        assert (np.abs(ours.loss_contribution - theirs.loss_contribution)[:, SLOT] > 1e-9).all()
        if isolation is Isolation.NONE:
            assert (np.abs(ours.loss - theirs.loss) > 1e-9).all()
            assert (one.host.values != other.host.values).any(dim=1).all()


@pytest.mark.parametrize("isolation", list(Isolation))
def test_gates_learn_with_their_seeds(isolation: Isolation) -> None:
    population = with_seeds(Blend.GATE, isolation)
    bank = population.banks[SeedKind(SLOT, MLP, Blend.GATE)]
    for name in ("gate.weight", "gate.bias"):
        assert (bank.block.parameters[name].abs().amax(1) > 0).all(), name
    assert bank.block.steps.tolist() == [9] * COUNT
    assert_aligned(population)


def test_a_new_alpha_leaves_a_seed_its_blend_and_all_it_has_learned() -> None:
    for blend in Blend:
        population = with_seeds(blend)
        before = state_of(population, 0)
        population.evidence = good_evidence(population)
        population.decide(np.stack([make_action(Op.SET_ALPHA, SLOT, alpha_target=0.5)] * COUNT))
        assert population.table.blend[:, SLOT].tolist() == [blend] * COUNT
        after = state_of(population, 0)
        for name in before:
            if name.startswith("seed."):
                assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isolation", list(Isolation))
def test_seeds_cost_what_they_are_made_of(isolation: Isolation, strategy: Strategy) -> None:
    """By the modules that the same seeds are in separate models."""
    fast, slow, _ = grown(isolation, strategy)
    costs = fast.specs.costs
    parameters, flops, memory = (cost.resident(fast.table) for cost in (costs.parameters, costs.flops, costs.memory))
    for network, slot in np.ndindex(*fast.table.stage.shape):
        seed = slow.seeds.get((network, slot))
        own = 0 if seed is None else sum(parameter.numel() for parameter in seed.parameters())
        assert parameters[network, slot] == own
        assert memory[network, slot] == own * 8 * 4  # float64; value, gradient and two moments
        site = slow.models[network].slots[SUITE.sites[slot]].site
        assert flops[network, slot] == (0 if seed is None else seed.flops_at(site))
    assert fast.count_seed_parameters(fast.table.owning).tolist() == parameters.sum(1).tolist()


@pytest.mark.parametrize("what", ["parameters", "flops", "memory"])
@pytest.mark.parametrize("blend", Blend)
def test_budgets_have_room_for_what_the_dearest_blend_needs(blend: Blend, what: str) -> None:
    free = with_seeds(blend)
    price = int(getattr(free.specs.costs, what).resident(free.table)[0, SLOT])
    for cap, fits in ((price, True), (price - 1, False)):
        allowed = rules().model_copy(update={"blends": (Blend.ADD, blend)})
        capped = replace(plan(allowed), budget=Budget(**{what: cap}))
        population = Population(capped, networks(instances(COUNT)))
        assert population.legal_actions().blueprint[0, SLOT, MLP] == fits
        if fits:
            population.decide(
                np.stack([make_action(Op.GERMINATE, SLOT, MLP, blend=blend), *make_wait_actions(COUNT - 1)])
            )
            assert population.budget_left[0] == 0.0
