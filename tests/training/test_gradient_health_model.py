"""The health of one model's seeds in a loop of one's own."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch import nn

from esper.errors import ConfigError
from esper.lifecycle.stages import Stage
from esper.tasks.suite import OptimizerSettings
from esper.training.evaluation import evaluate, remember
from esper.training.gradients import GradientHealth, SeedHealth
from esper.training.learning import train
from open_rules import open_rules
from training.scenes import SUITE, VALIDATION, Draws, both, instances, plan


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
                expected = report.health.at(network, SUITE.sites.index(name))
                np.testing.assert_allclose(astuple(health), astuple(expected), rtol=1e-9)
                compared += 1
        remember(fast, report, evaluate(fast, draws.batch(VALIDATION)))
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
