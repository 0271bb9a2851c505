"""Health of seeds' gradients in populations, held to the gradients of separate modules."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from esper.engine.gradients import GradientHealthSettings
from esper.lifecycle.rules import Isolation
from esper.lifecycle.table import Stage
from esper.population.evaluation import evaluate
from esper.population.learning import compute_row_norms, train
from esper.population.population import Population
from esper.tasks.suite import OptimizerSettings
from open_rules import open_rules
from population.gradient_reference import NOT_LEARNING, GradientReference, health_at
from population.scenes import VALIDATION, Draws, both, instances, networks, plan, record_measurements
from reference_population import ReferencePopulation

TOLERANCE = 1e-9
NAN = float("nan")
SGD = OptimizerSettings(name="sgd", momentum=0.9)
NARROW = GradientHealthSettings(vanished_ratio=0.5, exploded_ratio=1.5)
"""So that there is much that vanishes and explodes."""


def watch(slow: ReferencePopulation, network: int) -> GradientReference:
    """Watches what learns in a network of a reference population."""
    seeds = {slot: seed for (owner, slot), seed in slow.seeds.items() if owner == network}
    stages = slow.table.stage[network]
    fossils = [seed for slot, seed in seeds.items() if stages[slot] == Stage.FOSSILIZED]
    learning = {slot: seed for slot, seed in seeds.items() if stages[slot] != Stage.GERMINATED}
    return GradientReference([slow.models[network].host, *fossils], learning, NARROW)


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
def test_populations_find_what_separate_modules_find(isolation: Isolation, strategy: str) -> None:
    chosen = instances(8)
    rules = open_rules(isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0)
    fast, slow = both(chosen, replace(plan(rules, SGD, strategy), gradient_health=NARROW))
    draws = Draws(chosen)
    shares, stages = list[float](), set[int]()
    for _ in range(7):
        actions = draws.actions(fast.legal_actions())
        slow.measurements = fast.measurements
        fast.decide(actions)
        slow.decide(actions)
        batches = [draws.batch() for _ in range(2)]
        report = train(fast, batches)
        watches = [watch(slow, network) for network in range(fast.size)]
        for batch in batches:
            slow.train([batch])
            for network in watches:
                network.observe()
        expected = [network.report() for network in watches]
        for network, slot in np.ndindex(*report.health.norm.shape):
            found = health_at(report.health, network, slot)
            reference = expected[network].get(slot, NOT_LEARNING)
            np.testing.assert_allclose(astuple(found), astuple(reference), rtol=TOLERANCE, atol=0)
            shares += [found.vanished, found.exploded]
        stages |= set(np.unique(fast.table.stage).tolist())
        record_measurements(fast, report, evaluate(fast, draws.batch(VALIDATION)))
    assert {0.0, 0.5, 1.0} == set(shares), "the test means to see all of them"
    assert {Stage.GERMINATED, Stage.BLENDING, Stage.FOSSILIZED} <= stages
    assert (Stage.TRAINING in stages) == (isolation is not Isolation.NONE)


def grown(draws: Draws) -> Population:
    """Networks some of whose seeds learn."""
    population = Population(plan(open_rules(harm_tolerance=1.0)), networks(draws.chosen))
    for _ in range(5):
        population.decide(draws.actions(population.legal_actions()))
        report = train(population, [draws.batch()])
        record_measurements(population, report, evaluate(population, draws.batch(VALIDATION)))
    return population


def test_resting_networks_have_no_seed_that_learns() -> None:
    draws = Draws(instances(8))
    population = grown(draws)
    learning = train(population, [draws.batch()]).health.minibatches > 0
    resting = np.arange(8) % 2 == 0
    found = train(population, [draws.batch()], resting).health
    assert learning[resting].any()
    np.testing.assert_array_equal(found.minibatches > 0, learning & ~resting[:, None])
    assert np.isnan(found.ratio[resting]).all()
    assert not found.norm[resting].any()


def test_a_network_that_blows_up_is_told_from_its_neighbours() -> None:
    draws = Draws(instances(8))
    population = grown(draws)
    ill = int((population.table.stage == Stage.BLENDING).any(1).argmax())
    with torch.no_grad():
        population.host.values[ill] = NAN
    found = train(population, [draws.batch()]).health
    seeds = found.minibatches > 0
    assert seeds[ill].any()
    assert (found.exploded[ill] == seeds[ill]).all()
    others = np.arange(8) != ill
    assert seeds[others].any()
    assert not found.exploded[others].any()


def test_the_norms_of_a_minibatch_are_taken_without_looking_at_them() -> None:
    """Tensors without data stand for those of a device that has not computed them yet."""
    norms = compute_row_norms([torch.ones(3, 5, device="meta"), torch.ones(2, 4, device="meta")])
    assert norms.shape == (5,)
