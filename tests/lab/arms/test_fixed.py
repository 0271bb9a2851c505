"""Networks of fixed shape: the bare one is the arm that never grows, and longer training goes on in the same order."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from esper.control.rules import Never
from esper.growth.blueprints.registry import get
from esper.lab.static_networks import (
    Prices,
    StaticNetwork,
    examples_per_decision,
    lengthen_episodes,
    measure_arm,
    train_static,
)
from esper.lifecycle.actions import Blend
from esper.population.parameters import SeedKind
from esper.population.population import Fossils
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.train.evaluation import evaluate_controllers
from esper.train.results import Result
from esper.train.workers import LocalWorkers
from lab.arms.planting import TERMS, instances

SHAPE: Fossils = (SeedKind(0, 3), SeedKind(1, 1, Blend.GATE))


def trained(networks: list[StaticNetwork]) -> list[Result]:
    with LocalWorkers(1) as workers:
        return train_static(workers, TERMS, "none", networks)


def test_a_bare_network_trained_to_the_horizon_is_the_arm_that_never_grows() -> None:
    suite, chosen = get_suite("short"), instances(6)
    with LocalWorkers(1) as workers:
        never = measure_arm(evaluate_controllers(workers, [Never()], TERMS, chosen)[0], suite).outcomes
    assert trained([StaticNetwork(one, (), suite.steps) for one in chosen]) == never


def test_every_network_is_scored_at_its_own_time_whoever_is_beside_it() -> None:
    chosen = instances(3)
    networks = [
        StaticNetwork(chosen[0], (), 11),
        StaticNetwork(chosen[1], SHAPE, 3),
        StaticNetwork(chosen[2], SHAPE, 7),
    ]
    together = trained(networks)
    assert [trained([one])[0] for one in networks] == together
    assert [one.instance for one in together] == [one.name for one in chosen]


def test_longer_training_is_more_of_the_same() -> None:
    """As long as the horizon or longer, the first epochs are the same minibatches."""
    suite, chosen = get_suite("short"), instances(2)
    usual = Episodes(suite, chosen, TERMS.rules)
    longer = Episodes(lengthen_episodes(suite, 3 * suite.steps), chosen, TERMS.rules)
    first = np.zeros(2, np.int64)
    for one, other in zip(usual._stream.draw_batches(first, 8), longer._stream.draw_batches(first, 8), strict=True):
        assert one.inputs.equal(other.inputs)
        assert one.labels.equal(other.labels)
    assert suite.steps == get_suite("short").steps
    assert trained([StaticNetwork(chosen[0], (), 8)]) != trained([StaticNetwork(chosen[0], (), 24)])


def test_fossils_are_charged_for_from_the_first_step() -> None:
    suite, (one,) = get_suite("short"), instances(1)
    prices = Prices(suite)
    (found,) = trained([StaticNetwork(one, SHAPE, 5)])
    sites = Episodes(suite, [one], TERMS.rules).population.execution.sites
    forward = prices.network(one, ())
    for slot, blueprint, _ in SHAPE:
        site = sites[slot].with_width(one.widths[slot])
        forward += get(suite.blueprints[blueprint]).flops_at(site)
    assert prices.network(one, SHAPE) == forward
    assert found.flops == 3 * forward * 5 * examples_per_decision(suite)
    assert found.added_parameters > 0
    assert asdict(found)["controller"] == "none"
