"""The stacked population does what a plain loop over separate modules with torch.optim does."""

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Isolation
from esper.lifecycle.stages import Stage
from esper.population.evaluation import evaluate
from esper.population.learning import train
from esper.population.population import Population
from esper.tasks.suite import OptimizerSettings
from open_rules import open_rules
from population.scenes import (
    SUITE,
    VALIDATION,
    Draws,
    both,
    instances,
    kind_of,
    parameters_of,
    plan,
    record_evidence,
    seed_values,
)
from reference_population import ReferencePopulation

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
DECISIONS, BATCHES = 10, 5
OPTIMIZERS = [
    OptimizerSettings(name="adamw", weight_decay=0.01),
    OptimizerSettings(name="sgd", momentum=0.9, weight_decay=0.01),
    OptimizerSettings(name="adamw", clip_norm=0.5),
]


def assert_equal_parameters(fast: Population, slow: ReferencePopulation) -> None:
    for network, model in enumerate(slow.models):
        expected = fast.host.layout.flatten_module(model.host)
        torch.testing.assert_close(fast.host.values.detach()[network], expected, **TOLERANCE)
        for slot in range(len(SUITE.sites)):
            row, seed = seed_values(fast, network, slot), slow.seeds.get((network, slot))
            assert (row is None) == (seed is None)
            if row is not None and seed is not None:
                shape = fast.banks[kind_of(fast, network, slot)].block.layout
                torch.testing.assert_close(row, shape.flatten_module(parameters_of(seed)), **TOLERANCE)


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd", "clipped"])
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.few(1)
def test_fifty_steps_equal_a_loop_over_modules(
    isolation: Isolation, optimizer: OptimizerSettings, strategy: str
) -> None:
    chosen = instances(14)
    rules = open_rules(
        isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)
    )
    fast, slow = both(chosen, plan(rules, optimizer, strategy))
    draws = Draws(chosen)
    stages: set[int] = set()
    for _ in range(DECISIONS):
        actions = draws.actions(fast.legal_actions())
        slow.evidence = fast.evidence
        fast.decide(actions)
        slow.decide(actions)
        batches = [draws.batch() for _ in range(BATCHES)]
        report = train(fast, batches)
        slow.train(batches)
        record_evidence(fast, report, evaluate(fast, draws.batch(VALIDATION)))
        assert_equal_parameters(fast, slow)
        stages |= set(np.unique(fast.table.stage).tolist())
    assert {Stage.GERMINATED, Stage.BLENDING, Stage.HOLDING, Stage.PRUNED} <= stages
    assert (Stage.TRAINING in stages) == (isolation is not Isolation.NONE)
    assert len({kind.blueprint for kind in fast.banks}) >= 3, "the test means to mix blueprints"
    assert {kind.blend for kind in fast.banks} == {*Blend}, "and blends"
