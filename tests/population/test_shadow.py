"""Isolation `select_isolated`: a seed in TRAINING learns, and nobody else notices."""

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation
from esper.lifecycle.table import Stage
from esper.population.forward import forward, select_blended
from esper.population.learning import train
from esper.population.parameters import SeedKind
from esper.population.population import Population
from esper.tasks.suite import OptimizerSettings
from open_rules import open_rules
from population.scenes import SUITE, Draws, assert_same_state, good_measurements, instances, networks, plan, state_of

SHADOW = open_rules(isolation=Isolation.SHADOW, min_training_steps=1)
MLP, ATTENTION = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("attention")
COUNT = 3
SGD = OptimizerSettings(name="sgd", momentum=0.9)


def decided(population: Population, *actions: np.ndarray) -> None:
    for chosen in actions:
        population.measurements = good_measurements(population)
        population.decide(np.stack([chosen] * COUNT))


def populations(optimizer: OptimizerSettings) -> tuple[Population, Population]:
    """Both have a seed in HOLDING; the first one also has one in TRAINING."""
    pair = [Population(plan(SHADOW, optimizer), networks(instances(COUNT))) for _ in range(2)]
    stay = make_wait_actions(1)[0]
    for population, second in zip(pair, (make_action(Op.GERMINATE, 0, MLP), stay), strict=True):
        decided(
            population,
            make_action(Op.GERMINATE, 2, ATTENTION),
            stay,
            make_action(Op.ADVANCE, 2),
            stay,
            stay,
            second,
            stay,
        )
        assert population.table.stage[0, 2] == Stage.HOLDING
    assert pair[0].table.stage[0].tolist() == [Stage.TRAINING, Stage.DORMANT, Stage.HOLDING]
    return pair[0], pair[1]


@pytest.mark.parametrize("optimizer", [OptimizerSettings(name="adamw"), SGD], ids=["adamw", "sgd"])
def test_only_the_isolated_seed_learns_more(optimizer: OptimizerSettings) -> None:
    shadowed, plain = populations(optimizer)
    before = shadowed.banks[SeedKind(0, MLP)].block.values.detach().clone()
    outputs, batches = [], [Draws(instances(COUNT)).batch() for _ in range(3)]
    for population in (shadowed, plain):
        report = train(population, batches)
        outputs.append((report.loss, forward(population, select_blended(population), batches[0].inputs).detach()))
    assert (outputs[0][0] == outputs[1][0]).all()
    assert torch.equal(outputs[0][1], outputs[1][1])
    for network in range(COUNT):
        mine, other = state_of(shadowed, network), state_of(plain, network)
        learned = {name for name in mine if name.startswith(("host.", f"seed.2.{ATTENTION}."))}
        assert learned
        assert_same_state({name: mine[name] for name in learned}, {name: other[name] for name in learned}, 1e-12)
    assert (shadowed.banks[SeedKind(0, MLP)].block.values.detach() != before).any(dim=1).all()
    assert shadowed.banks[SeedKind(0, MLP)].block.steps.tolist() == [3] * COUNT


def test_the_output_is_bit_identical_while_a_seed_trains() -> None:
    shadowed, plain = populations(SGD)
    inputs = Draws(instances(COUNT)).batch().inputs
    with torch.no_grad():
        shadowed.banks[SeedKind(0, MLP)].block.values.normal_(generator=torch.Generator().manual_seed(0))
        outputs = [forward(population, select_blended(population), inputs) for population in (shadowed, plain)]
    assert torch.equal(outputs[0], outputs[1])
