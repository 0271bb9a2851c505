"""Networks that have a label at every position, as language models: what a loop over single ones does."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.lifecycle.rules import Isolation
from esper.population.evaluation import evaluate_committed
from esper.population.learning import compute_accuracies, compute_losses
from esper.population.population import Population, Strategy
from esper.population.promise import PromiseMeter
from esper.tasks.registry import get_suite
from open_rules import open_rules
from population.scenes import Draws, advance_both, assert_equal_parameters, both, instances, networks, plan

SUITE = get_suite("language")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
RULES = open_rules(isolation=Isolation.SHADOW, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0)


def test_losses_and_accuracies_are_means_over_positions_too() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 4, 5, 6, generator=generator), torch.randint(6, (3, 4, 5), generator=generator)
    one_by_one = [
        [(F.cross_entropy(own, label), (own.argmax() == label).float()) for own, label in zip(*pair, strict=True)]
        for pair in zip(logits.flatten(1, 2), labels.flatten(1), strict=True)
    ]
    losses, accuracies = torch.tensor(one_by_one).mean(1).unbind(1)
    torch.testing.assert_close(compute_losses(logits, labels), losses)
    torch.testing.assert_close(compute_accuracies(logits, labels), accuracies)


@pytest.mark.parametrize("strategy", ["stacked", pytest.param("looped", marks=pytest.mark.landing)])
def test_they_learn_and_are_measured_as_a_loop_over_modules_does(strategy: Strategy) -> None:
    chosen = instances(5, SUITE)
    fast, slow = both(chosen, plan(RULES, None, strategy, suite=SUITE))
    draws = Draws(chosen)
    for _ in range(4):
        actions = draws.actions(fast.legal_actions())
        batches, held_back = [draws.batch(3) for _ in range(2)], draws.batch(4)
        found = advance_both(fast, slow, actions, batches, held_back)
        assert_equal_parameters(fast, slow)
        logits = slow.logits(held_back.inputs)
        torch.testing.assert_close(torch.from_numpy(found.loss), compute_losses(logits, held_back.labels), **TOLERANCE)
        expected = compute_accuracies(logits, held_back.labels)
        torch.testing.assert_close(torch.from_numpy(found.accuracy), expected, **TOLERANCE)
    assert fast.table.owning.any(axis=1).sum() > 2, "the test means to grow"


def test_committed_networks_are_measured_alike_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = instances(2, SUITE)
    population, batch = Population(plan(RULES, suite=SUITE), networks(chosen)), Draws(chosen).batch(5)
    whole = evaluate_committed(population, batch)
    monkeypatch.setattr("esper.population.evaluation.EVALUATION_CHUNK", 2)
    in_chunks = evaluate_committed(population, batch)
    np.testing.assert_allclose(in_chunks.loss, whole.loss, **TOLERANCE)
    np.testing.assert_allclose(in_chunks.accuracy, whole.accuracy, **TOLERANCE)


def test_promise_equals_looking_at_each_network_alone() -> None:
    chosen = instances(2, SUITE)
    fast, slow = both(chosen, plan(RULES, suite=SUITE))
    batch = Draws(chosen).batch(6)

    def each_loss(model: torch.nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(pair[0]).mT, pair[1], reduction="none").mean(1)

    found = PromiseMeter(fast).measure(batch, np.ones(fast.table.stage.shape, np.bool_))
    compared = 0
    for network, model in enumerate(slow.models):
        for row in model.look(each_loss, [(batch.inputs[network], batch.labels[network])], draws=1).rows:
            if row.blueprint in SUITE.blueprints:
                place = network, SUITE.sites.index(row.slot), SUITE.blueprints.index(row.blueprint)
                assert found.fitted[place] == pytest.approx(row.promise, abs=1e-7)
                assert found.held_out[place] == pytest.approx(row.promise_held_out, abs=1e-7)
                compared += 1
    assert compared == 2 * len(SUITE.sites) * len(SUITE.blueprints)
