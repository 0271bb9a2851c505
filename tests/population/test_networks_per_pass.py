"""A cohort too large for the memory there is, computed in passes of some networks each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Isolation
from esper.population.evaluation import evaluate
from esper.population.learning import train
from esper.population.population import STRATEGIES, Population, Strategy
from esper.population.shapley import attribute_networks
from esper.tasks.suite import OptimizerSettings
from esper.tasks.token_suite import TokenHost
from open_rules import open_rules
from population.memory import measure_growth, needs_peaks
from population.scenes import VALIDATION, Draws, assert_same_state, instances, networks, plan, record_evidence, state_of

COUNT, DECISIONS = 7, 8
TOLERANCE = 1e-12
CLIPPED = OptimizerSettings(name="adamw", clip_norm=0.5)


def population(limit: int | None, isolation: Isolation, strategy: Strategy = "stacked") -> Population:
    rules = open_rules(
        isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)
    )
    return Population(replace(plan(rules, CLIPPED, strategy), networks_per_pass=limit), networks(instances(COUNT)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.few(1)
def test_passes_of_some_networks_give_what_one_pass_gives(limit: int, isolation: Isolation, strategy: Strategy) -> None:
    whole, parts = population(None, isolation, strategy), population(limit, isolation, strategy)
    draws = Draws(instances(COUNT))
    resting = np.arange(COUNT) == 4
    for _ in range(DECISIONS):
        actions = draws.actions(whole.legal_actions())
        batches, held_back = [draws.batch() for _ in range(2)], draws.batch(VALIDATION)
        for one in (whole, parts):
            one.decide(actions)
            report = train(one, batches, resting)
            record_evidence(one, report, evaluate(one, held_back))
        for network in range(COUNT):
            assert_same_state(state_of(parts, network), state_of(whole, network), TOLERANCE)
    assert whole.table.blended.any()
    assert {kind.blend for kind in whole.banks} == {*Blend}
    earned, expected = (attribute_networks(one, held_back, np.random.default_rng(0)) for one in (parts, whole))
    np.testing.assert_allclose(earned.values, expected.values, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("limit", [None, 1, 3, COUNT, 2 * COUNT])
def test_no_pass_holds_more_networks_than_the_limit(limit: int | None) -> None:
    held = population(limit, Isolation.NONE)
    seen: list[int] = []

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if isinstance(module, TokenHost):
            seen.append(len(inputs[0]))

    draws = Draws(instances(COUNT))
    with torch.nn.modules.module.register_module_forward_pre_hook(look):
        train(held, [draws.batch()])
        evaluate(held, draws.batch(VALIDATION))
    assert max(seen) == min(limit or COUNT, COUNT)


@pytest.mark.landing
@needs_peaks
@pytest.mark.parametrize("limit", [1, 8])
def test_passes_of_some_networks_save_memory(limit: int) -> None:
    assert 2 * measure_growth("networks_per_pass", limit) < measure_growth("networks_per_pass", 0)
