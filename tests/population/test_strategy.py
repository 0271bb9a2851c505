"""Choosing between the stacked program and the loop."""

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import make_wait_actions
from esper.lifecycle.rules import Rules
from esper.population import forward
from esper.population.population import STRATEGIES, Population, Strategy
from esper.rl.episodes import Episodes
from open_rules import open_rules
from population.scenes import SUITE, both, instances, plan


@pytest.mark.parametrize("faster", STRATEGIES)
def test_the_faster_one_is_chosen_and_nothing_else_changes(faster: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    population, _ = both(instances(3), plan(open_rules()))
    before = population.host.values.detach().clone()
    tried: list[Strategy] = []

    def timed(running: Population, inputs: torch.Tensor) -> float:
        tried.append(running.strategy)
        return 1.0 if running.strategy == faster else 2.0

    monkeypatch.setattr(forward, "_time_pass", timed)
    assert (
        forward.find_fastest_strategy(population, torch.zeros(3, 4, *SUITE.input_shape, dtype=torch.float64)) == faster
    )
    assert tried == list(STRATEGIES) * (1 + forward.ROUNDS)
    assert population.strategy == "stacked"
    assert torch.equal(population.host.values, before)


def test_auto_gives_what_a_named_strategy_gives() -> None:
    chosen = instances(2)
    auto, named = (Episodes(SUITE, chosen, Rules(), strategy=one) for one in ("auto", "stacked"))
    assert auto.population.strategy in STRATEGIES
    results = [episodes.step(make_wait_actions(2)).evaluation.loss for episodes in (auto, named)]
    np.testing.assert_allclose(*results, rtol=1e-4)
