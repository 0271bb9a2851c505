"""Health of seeds' gradients: populations held to separate modules with autograd, and to a slow reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from esper.engine.gradients import EXPLODED, VANISHED, HealthTable
from esper.errors import ConfigError
from esper.lifecycle.rules import Isolation
from esper.lifecycle.stages import Stage
from esper.population.evaluation import evaluate
from esper.population.learning import Batch, compute_row_norms, train
from esper.population.population import Population
from esper.tasks.suite import OptimizerSettings
from open_rules import open_rules
from population.gradient_reference import GradientHealth, SeedHealth, health_at
from population.scenes import SUITE, VALIDATION, Draws, both, instances, networks, plan, record_evidence
from reference_population import ReferencePopulation

TOLERANCE = 1e-9
NAN = float("nan")
SGD = OptimizerSettings(name="sgd", momentum=0.9)


def norm_of(modules: Sequence[nn.Module]) -> tuple[float, int]:
    """Norm of the gradient of all their parameters together, and how many they are."""
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for module in modules
        for parameter in module.parameters()
    ]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return float(flat.norm()), len(flat)


class SlowHealth:
    """The figures of every seed of a reference population, minibatch by minibatch."""

    def __init__(self, slow: ReferencePopulation) -> None:
        self._slow = slow
        self._norms: dict[tuple[int, int], list[float]] = {place: [] for place in slow.seeds}
        self._ratios: dict[tuple[int, int], list[float]] = {place: [] for place in slow.seeds}

    def train(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._slow.train([batch])
            for (network, slot), seed in self._slow.seeds.items():
                fossils = [
                    other
                    for (owner, place), other in self._slow.seeds.items()
                    if owner == network and self._slow.table.stage[owner, place] == Stage.FOSSILIZED
                ]
                norm, count = norm_of([seed])
                incumbents, total = norm_of([self._slow.models[network].host, *fossils])
                self._norms[network, slot].append(norm)
                self._ratios[network, slot].append((norm / count**0.5) / (incumbents / total**0.5))

    def assert_equals(self, found: HealthTable, last: NDArray[np.float64]) -> None:
        for network, slot in np.ndindex(*found.norm.shape):
            health = health_at(found, network, slot)
            learns = (network, slot) in self._norms and self._slow.table.stage[network, slot] != Stage.GERMINATED
            if not learns:
                np.testing.assert_array_equal(astuple(health), (0, 0.0, 0.0, 0.0, np.nan))
                continue
            norms, ratios = self._norms[network, slot], self._ratios[network, slot]
            assert last[network, slot] == pytest.approx(norms[-1], rel=TOLERANCE)
            assert health.minibatches == len(norms)
            assert health.norm == pytest.approx(sum(norms) / len(norms), rel=TOLERANCE)
            assert health.ratio == pytest.approx(sum(ratios) / len(ratios), rel=TOLERANCE)
            assert health.vanished == sum(ratio < VANISHED for ratio in ratios) / len(ratios)
            assert health.exploded == sum(ratio > EXPLODED for ratio in ratios) / len(ratios)


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
def test_populations_find_what_separate_modules_find(isolation: Isolation, strategy: str) -> None:
    chosen = instances(8)
    rules = open_rules(isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0)
    fast, slow = both(chosen, plan(rules, SGD, strategy))
    draws = Draws(chosen)
    learned, stages = 0, set[int]()
    for _ in range(7):
        actions = draws.actions(fast.legal_actions())
        slow.evidence = fast.evidence
        fast.decide(actions)
        slow.decide(actions)
        batches = [draws.batch() for _ in range(2)]
        report = train(fast, batches)
        reference = SlowHealth(slow)
        reference.train(batches)
        reference.assert_equals(report.health, report.seed_gradient)
        learned += int((report.health.minibatches > 0).sum())
        stages |= set(np.unique(fast.table.stage).tolist())
        record_evidence(fast, report, evaluate(fast, draws.batch(VALIDATION)))
    assert learned > 20
    assert {Stage.GERMINATED, Stage.BLENDING, Stage.FOSSILIZED} <= stages
    assert (Stage.TRAINING in stages) == (isolation is not Isolation.NONE)


def grown(draws: Draws) -> Population:
    """Networks some of whose seeds learn."""
    population = Population(plan(open_rules(harm_tolerance=1.0)), networks(draws.chosen))
    for _ in range(5):
        population.decide(draws.actions(population.legal_actions()))
        report = train(population, [draws.batch()])
        record_evidence(population, report, evaluate(population, draws.batch(VALIDATION)))
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


def layers() -> tuple[nn.Linear, nn.Linear]:
    """A host and a seed, with gradients."""
    host, seed = nn.Linear(2, 2, bias=False), nn.Linear(4, 1, bias=False)
    host.weight.grad = torch.full((2, 2), 2.0)
    seed.weight.grad = torch.full((1, 4), 1.0)
    return host, seed


def test_it_finds_what_a_population_finds() -> None:
    chosen = instances(8)
    rules = open_rules(cooldown=(1, 1, 1), harm_tolerance=1.0)
    fast, slow = both(chosen, plan(rules, OptimizerSettings(name="sgd", momentum=0.9)))
    draws = Draws(chosen)
    compared = fossils = 0
    for _ in range(7):
        actions = draws.actions(fast.legal_actions())
        slow.evidence = fast.evidence
        fast.decide(actions)
        slow.decide(actions)
        batches = [draws.batch() for _ in range(2)]
        report = train(fast, batches)
        learning = report.health.minibatches > 0
        watches: list[GradientHealth] = []
        for network, model in enumerate(slow.models):
            seeds = {SUITE.sites[slot]: slow.seeds[network, slot] for slot in learning[network].nonzero()[0].tolist()}
            kept = [
                slow.seeds[network, slot]
                for slot in (slow.table.stage[network] == Stage.FOSSILIZED).nonzero()[0].tolist()
            ]
            incumbents = [parameter for module in (model.host, *kept) for parameter in module.parameters()]
            watches.append(GradientHealth(incumbents, {name: seed.parameters() for name, seed in seeds.items()}))
            fossils += len(kept)
        for batch in batches:
            slow.train([batch])
            for watch in watches:
                watch.observe()
        for network, watch in enumerate(watches):
            for name, health in watch.report().items():
                expected = health_at(report.health, network, SUITE.sites.index(name))
                np.testing.assert_allclose(astuple(health), astuple(expected), rtol=1e-9)
                compared += 1
        record_evidence(fast, report, evaluate(fast, draws.batch(VALIDATION)))
    assert compared > 20
    assert fossils


def test_a_report_is_of_the_minibatches_since_the_last() -> None:
    host, seed = layers()
    health = GradientHealth(host.parameters(), {"a": seed.parameters()})
    health.observe()
    assert seed.weight.grad is not None
    seed.weight.grad *= 3
    health.observe()
    assert health.report() == {"a": SeedHealth(2, 4.0, 0.0, 0.0, 1.0)}
    health.observe()
    assert health.report() == {"a": SeedHealth(1, 6.0, 0.0, 0.0, 1.5)}
    np.testing.assert_array_equal(astuple(health.report()["a"]), (0, 0.0, 0.0, 0.0, np.nan))


def test_a_parameter_without_gradient_counts_as_one_of_zeros() -> None:
    host, seed = layers()
    unused = nn.Parameter(torch.ones(12))
    health = GradientHealth(host.parameters(), {"part": [seed.weight, unused], "none": [unused]})
    health.observe()
    found = health.report()
    assert found["part"].ratio == 0.25  # a quarter of its parameters have half the gradient: sqrt(1/16)
    assert found["none"] == SeedHealth(1, 0.0, 1.0, 0.0, 0.0)


def test_frozen_parameters_say_nothing() -> None:
    host, seed = layers()
    backbone = nn.Linear(100, 100).requires_grad_(False)
    whole = GradientHealth([*backbone.parameters(), *host.parameters()], {"a": seed.parameters()})
    alone = GradientHealth(backbone.parameters(), {"a": seed.parameters()})
    whole.observe()
    alone.observe()
    assert whole.report()["a"].ratio == 0.5
    assert np.isnan(alone.report()["a"].ratio)


def test_a_seed_that_cannot_learn_is_refused() -> None:
    host, seed = layers()
    with pytest.raises(ConfigError, match="seed 'a' has no parameter that needs a gradient: leave it out"):
        GradientHealth(host.parameters(), {"a": seed.requires_grad_(False).parameters()})


def test_to_observe_waits_for_no_device() -> None:
    """Tensors without data stand for those of a device that has not computed them yet."""
    host, seed = (layer.to("meta") for layer in layers())
    host.weight.grad, seed.weight.grad = torch.ones_like(host.weight), torch.ones_like(seed.weight)
    health = GradientHealth(
        host.parameters(), {"a": seed.parameters(), "b": [nn.Parameter(torch.ones_like(seed.weight))]}
    )
    health.observe()
