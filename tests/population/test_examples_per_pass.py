"""A minibatch too large for the memory there is, computed in parts whose gradients are added up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.errors import ConfigError
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Isolation
from esper.population.evaluation import evaluate, evaluate_committed
from esper.population.learning import train
from esper.population.population import STRATEGIES, Population, Strategy
from esper.population.promise import PromiseMeter
from esper.population.shapley import attribute_networks
from esper.tasks.suite import OptimizerSettings
from esper.tasks.token_suite import TokenHost
from open_rules import open_rules
from population.memory import measure_growth, needs_peaks
from population.scenes import (
    BATCH,
    VALIDATION,
    Draws,
    assert_same_state,
    instances,
    networks,
    plan,
    record_evidence,
    state_of,
)
from population.test_kinds_of_hosts import DRAWING, KEEPING, configure

COUNT, DECISIONS = 7, 8
TOLERANCE = 1e-9
"""Sums of parts are rounded otherwise than the sum of the whole, by some 1e-16, and AdamW amplifies that."""
CLIPPED = OptimizerSettings(name="adamw", clip_norm=0.5)
SAME_IN_PARTS = {"weight norm", "group normalisation", "no dropout", "attention"}


def population(
    limit: int | None, isolation: Isolation, strategy: Strategy = "stacked", together: int = 3
) -> Population:
    rules = open_rules(
        isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)
    )
    config = replace(plan(rules, CLIPPED, strategy), examples_per_pass=limit, networks_per_pass=together)
    return Population(config, networks(instances(COUNT)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("limit", [4, pytest.param(1, marks=pytest.mark.landing)])
def test_parts_of_minibatches_give_what_whole_ones_give(limit: int, isolation: Isolation, strategy: Strategy) -> None:
    assert BATCH % 4, "the test means to have parts of different sizes"
    whole, parts = population(None, isolation, strategy), population(limit, isolation, strategy)
    draws = Draws(instances(COUNT))
    resting = np.arange(COUNT) == 4
    for _ in range(DECISIONS):
        actions = draws.actions(whole.legal_actions())
        batches, held_back = [draws.batch() for _ in range(2)], draws.batch(VALIDATION)
        reports = []
        for one in (whole, parts):
            one.decide(actions)
            report = train(one, batches, resting)
            record_evidence(one, report, evaluate(one, held_back))
            reports.append(report)
        for network in range(COUNT):
            assert_same_state(state_of(parts, network), state_of(whole, network), TOLERANCE)
        for name in ("loss", "accuracy", "host_gradient", "seed_gradient"):
            expected, found = (getattr(report, name) for report in reports)
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert whole.table.blended.any()
    assert isolation is Isolation.NONE or len({kind.blend for kind in whole.banks}) > 1
    due = np.ones(whole.table.stage.shape, np.bool_)
    for measure in (
        lambda one: attribute_networks(one, held_back, np.random.default_rng(0)).values,
        lambda one: evaluate_committed(one, held_back).loss,
        lambda one: PromiseMeter(one).measure(held_back, due).fetch().fitted,
    ):
        np.testing.assert_allclose(measure(parts), measure(whole), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("limit", [None, 1, 4, VALIDATION])
def test_no_pass_holds_more_examples_than_the_limit(limit: int | None) -> None:
    held = population(limit, Isolation.NONE)
    seen: list[int] = []

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if isinstance(module, TokenHost):
            seen.append(inputs[0].shape[1])

    draws = Draws(instances(COUNT))
    held.decide(draws.actions(held.legal_actions()))
    train(held, [draws.batch()])
    held_back = draws.batch(VALIDATION)
    due = np.ones(held.table.stage.shape, np.bool_)
    for act in (
        lambda: train(held, [held_back]),
        lambda: evaluate(held, held_back),
        lambda: evaluate_committed(held, held_back),
        lambda: attribute_networks(held, held_back, np.random.default_rng(0)),
        lambda: PromiseMeter(held).measure(held_back, due),
    ):
        seen.clear()
        with torch.nn.modules.module.register_module_forward_pre_hook(look):
            act()
        assert max(seen) == min(limit or VALIDATION, VALIDATION)


@pytest.mark.parametrize("name", [*KEEPING, *DRAWING])
def test_hosts_that_would_learn_something_else_are_refused(name: str) -> None:
    config, specs = configure({**KEEPING, **DRAWING}[name])
    config = replace(config, examples_per_pass=2)
    if name in SAME_IN_PARTS:
        Population(config, specs)
        return
    reason = "draw random numbers in training" if name in DRAWING else "depends on all examples of a minibatch"
    with pytest.raises(ConfigError, match=rf"examples_per_pass: .*{reason}.*: set it to null"):
        Population(config, specs)


@pytest.mark.landing
@needs_peaks
def test_parts_of_minibatches_save_memory() -> None:
    assert 2 * measure_growth("examples_per_pass", 4) < measure_growth("examples_per_pass", 0)
