"""Caps on growth: what they count, and that masks never let anybody exceed them."""

from dataclasses import replace

import numpy as np
import pytest

from esper.engine.budget import Budget
from esper.errors import IllegalActionError
from esper.growth.blueprints.registry import get
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.population.population import Population
from esper.tasks.suite import OptimizerSettings
from open_rules import open_rules
from population.scenes import SUITE, Draws, good_measurements, instances, networks, plan

MLP, GATE = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("gate")
QUICK = open_rules(cooldown=(1, 1, 1), min_training_steps=1)


def population(budget: Budget, count: int = 1, optimizer: OptimizerSettings | None = None) -> Population:
    shared = plan(QUICK, optimizer)
    return Population(type(shared)(**{**vars(shared), "budget": budget}), networks(instances(count)))


def cost(held: Population, kind: str, slot: int, what: str) -> int:
    site = replace(held.execution.sites[slot], width=int(held.specs.widths[0, slot]))
    return int(getattr(get(kind).cost_at(site), what))


@pytest.mark.parametrize("what", ["parameters", "flops"])
def test_what_would_exceed_a_cap_is_masked(what: str) -> None:
    free = population(Budget())
    dear, cheap = cost(free, "mlp", 0, what), cost(free, "gate", 1, what)
    assert 0 < cheap < dear
    for cap, mlp_first, gate_after in (
        (dear + cheap, True, True),
        (dear + cheap - 1, True, False),
        (dear - 1, False, True),
    ):
        held = population(Budget(**{what: cap}))
        assert held.legal_actions().blueprint[0, 0, MLP] == mlp_first
        if mlp_first:
            held.decide(make_action(Op.GERMINATE, 0, MLP)[None])
        assert held.legal_actions().blueprint[0, 1, GATE] == gate_after


@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("sgd", 1)])
def test_memory_is_that_of_values_gradients_and_moments(name: str, moments: int) -> None:
    held = population(Budget(), optimizer=OptimizerSettings(name=name))
    expected = cost(held, "mlp", 0, "parameters") * 8 * (2 + moments)  # float64
    assert held.specs.costs.memory.blueprints[0, 0, MLP] == expected
    for cap in (expected - 1, expected):
        capped = population(Budget(memory=cap), optimizer=OptimizerSettings(name=name))
        assert capped.legal_actions().blueprint[0, 0, MLP] == (cap == expected)


def test_a_pruned_seed_gives_its_share_back_and_a_fossil_does_not() -> None:
    price = cost(population(Budget()), "mlp", 0, "parameters")
    held = population(Budget(parameters=2 * price - 1))
    held.decide(make_action(Op.GERMINATE, 0, MLP)[None])
    np.testing.assert_allclose(held.budget_left, 1 - price / (2 * price - 1))
    assert not held.legal_actions().blueprint[0, 0, MLP]
    held.decide(make_action(Op.PRUNE, 0)[None])
    assert held.budget_left.tolist() == [1.0]
    for _ in range(3):
        held.decide(make_wait_actions(1))
    held.decide(make_action(Op.GERMINATE, 0, MLP)[None])
    for _ in range(5):
        held.measurements = good_measurements(held)
        held.decide(make_wait_actions(1))
    held.measurements = good_measurements(held)
    held.decide(make_action(Op.FOSSILIZE, 0)[None])
    assert held.budget_left[0] < 0.5


def test_the_scarcest_cap_is_what_is_left() -> None:
    held = population(Budget(parameters=10**9, flops=2 * cost(population(Budget()), "mlp", 0, "flops")))
    held.decide(make_action(Op.GERMINATE, 0, MLP)[None])
    assert held.budget_left.tolist() == [0.5]
    assert population(Budget(parameters=0)).budget_left.tolist() == [0.0]


def test_a_refusal_names_the_budget() -> None:
    held = population(Budget(parameters=cost(population(Budget()), "norm", 0, "parameters")))
    with pytest.raises(IllegalActionError, match=f"blueprint {MLP} does not fit into what is left of the budget"):
        held.decide(make_action(Op.GERMINATE, 0, MLP)[None])
    with pytest.raises(IllegalActionError, match="no blueprint is compatible with this slot and within the budget"):
        population(Budget(parameters=0)).decide(make_action(Op.GERMINATE, 0, MLP)[None])


def test_nobody_who_stays_within_the_masks_exceeds_a_cap() -> None:
    chosen = instances(12)
    caps = {"parameters": 150, "flops": 4000}
    shared = plan(QUICK)
    held = Population(type(shared)(**{**vars(shared), "budget": Budget(**caps)}), networks(chosen))
    draws, most, refused = Draws(chosen), dict.fromkeys(caps, 0), 0
    for _ in range(60):
        masks = held.legal_actions()
        refused += int((~masks.grounds.affordable).sum())
        held.measurements = good_measurements(held)
        held.decide(draws.actions(held.legal_actions()))
        for what in caps:
            spent = np.zeros(len(chosen), np.int64)
            for kind, bank in held.banks.items():
                for owner in bank.block.owners.tolist():
                    spent[owner] += getattr(held.specs.costs, what).blueprints[owner, kind.slot, kind.blueprint]
            most[what] = max(most[what], int(spent.max()))
    assert all(0 < most[what] <= cap for what, cap in caps.items())
    assert refused > 0
