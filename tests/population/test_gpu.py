"""Populations compute on a GPU what they compute on the CPU."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.control.rules import Uniform
from esper.engine.engine import GrowthConfig
from esper.growth.promise import PromiseSettings
from esper.lifecycle.rules import Isolation
from esper.population.evaluation import evaluate
from esper.population.learning import Batch, train
from esper.population.population import Population, Strategy
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite, suite_names
from gpu import CPU, GPU, full_float32, needs_gpu  # noqa: F401 - a fixture
from population.test_kinds_of_hosts import DRAWING, KEEPING, NETWORKS, configure, draw_batch, plant
from rl.short import QUICK

DECISIONS = 4
pytestmark = pytest.mark.usefixtures("full_float32")
both_strategies = pytest.mark.parametrize("strategy", ["stacked", "looped"])


@needs_gpu
@both_strategies
@pytest.mark.parametrize("name", suite_names())
def test_episodes_of_every_suite_are_those_of_the_cpu(name: str, strategy: Strategy) -> None:
    suite = copy.copy(get_suite(name))
    suite.batches_per_step = 2
    instances = suite.sample(4, "train", np.random.default_rng(3))
    config = GrowthConfig(promise=PromiseSettings(first=1, every=2, examples=8))
    near, far = (Episodes(suite, instances, QUICK, config, strategy=strategy, device=place) for place in (CPU, GPU))
    controller = Uniform()
    state = controller.start([one.seed for one in instances])
    for _ in range(DECISIONS):
        observation = near.observe()
        for expected, found in zip(observation, far.observe(), strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=0.02, atol=0.02)
        actions, state = controller.act(observation, near.legal_actions(), state)
        expected, found = near.step(actions), far.step(actions)
        np.testing.assert_allclose(found.training.loss, expected.training.loss, rtol=2e-3)
        np.testing.assert_allclose(found.evaluation.loss, expected.evaluation.loss, rtol=2e-3)
        np.testing.assert_array_equal(far.population.table.stage, near.population.table.stage)
    assert far.population.table.owning.any(), "the test means to grow"


@needs_gpu
@both_strategies
@pytest.mark.parametrize("isolation", [Isolation.NONE, Isolation.SHADOW])
@pytest.mark.parametrize("name", KEEPING)
def test_layers_with_buffers_are_those_of_the_cpu(name: str, isolation: Isolation, strategy: Strategy) -> None:
    config, networks = configure(KEEPING[name], strategy=strategy, isolation=isolation)
    populations = Population(config, networks), Population(replace(config, device=GPU), networks)
    for decision in range(3):
        losses = []
        for population, device in zip(populations, (CPU, GPU), strict=True):
            if decision == 0:
                population.decide(plant(range(NETWORKS)))
            batches = [place(draw_batch(10 * decision + number), device) for number in range(2)]
            losses.append([train(population, batches).loss, evaluate(population, place(draw_batch(99), device)).loss])
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@needs_gpu
@pytest.mark.parametrize("name", DRAWING)
def test_layers_that_draw_repeat_themselves(name: str) -> None:
    config, networks = configure(DRAWING[name], isolation=Isolation.NONE)
    batch = place(draw_batch(0), GPU)
    losses = [train(Population(replace(config, device=GPU), networks), [batch]).loss for _ in range(2)]
    np.testing.assert_array_equal(*losses)
    alone = [
        train(Population(replace(config, device=GPU), [one]), [part(batch, row)]).loss
        for row, one in enumerate(networks)
    ]
    np.testing.assert_allclose(np.concatenate(alone), losses[0], rtol=1e-6)


def place(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.inputs.to(device), batch.labels.to(device))


def part(batch: Batch, row: int) -> Batch:
    return Batch(batch.inputs[row : row + 1], batch.labels[row : row + 1])
