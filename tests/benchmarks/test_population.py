"""The benchmark gives both sides the same work."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.population import Work, advance, advance_loop, compare, evaluate_separately
from esper.population.evaluation import evaluate
from esper.population.population import STRATEGIES
from esper.rl.episodes import Episodes
from open_rules import OPEN_RULES
from reference_population import ReferencePopulation
from rl.short import SUITE, instances

DECISIONS = 7


def test_both_sides_do_the_same_work() -> None:
    episodes = Episodes(SUITE, instances(5), OPEN_RULES)
    fast = episodes.population
    slow = ReferencePopulation(fast.config, fast.specs.networks)
    work = Work.drawn(episodes, DECISIONS)
    assert len(work.script) == DECISIONS
    assert len(work.batches) == SUITE.batches_per_step
    for actions in work.script:
        advance(fast, actions, work)
        advance_loop(slow, actions, work)
    assert fast.table.owning.any()
    assert np.array_equal(fast.table.stage, slow.table.stage)
    actual, expected = evaluate_separately(slow, work.validation), evaluate(fast, work.validation)
    assert np.array_equal(np.isfinite(actual.loss_contribution), fast.table.owning)
    np.testing.assert_allclose(actual.loss, expected.loss, atol=1e-3)
    np.testing.assert_allclose(actual.loss_contribution, expected.loss_contribution, atol=1e-3)


def test_a_line_tells_rates_and_their_ratio() -> None:
    name, networks, strategy, *figures = compare("tokens", 2, 1, "auto", torch.device("cpu")).split()
    assert (name, networks) == ("tokens", "2")
    assert strategy in STRATEGIES
    population, loop, ratio = map(float, figures)
    assert abs(ratio - population / loop) < 0.1
