"""Promise in populations: what `model.look` says of each network alone, and nothing that a neighbour could change."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.growth.promise import Promises
from esper.lifecycle.rules import Isolation
from esper.numerics.arrays import Bools
from esper.population.learning import Batch
from esper.population.population import Population, Strategy
from esper.population.promise import PromiseMeter
from open_rules import open_rules
from population.scenes import SUITE, Draws, grown, instances, networks, plan

EXAMPLES = 12


def each_loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def measure(population: Population, batch: Batch) -> Promises:
    return PromiseMeter(population).measure(batch, everywhere(population))


def everywhere(population: Population) -> Bools:
    return np.ones(population.table.stage.shape, np.bool_)


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.few(1)
def test_it_equals_looking_at_each_network_alone(isolation: Isolation, strategy: Strategy) -> None:
    fast, slow, batch = grown(isolation, strategy)
    assert fast.table.owning.any()
    assert not fast.table.owning.all()
    found = measure(fast, batch)
    assert np.isfinite(found.fitted).all(axis=(1, 2)).any()
    for network, model in enumerate(slow.models):
        for row in model.look(each_loss, [(batch.inputs[network], batch.labels[network])], draws=1).rows:
            if row.blueprint not in SUITE.blueprints:
                continue
            place = network, SUITE.sites.index(row.slot), SUITE.blueprints.index(row.blueprint)
            assert found.fitted[place] == pytest.approx(row.promise, abs=1e-7)
            assert found.held_out[place] == pytest.approx(row.promise_held_out, abs=1e-7)


def test_it_does_not_depend_on_neighbours_nor_on_how_many_are_computed_at_once() -> None:
    chosen = instances(9)
    batch = Draws(chosen).batch(EXAMPLES)
    together = measure(Population(plan(open_rules()), networks(chosen)), batch)
    in_parts = measure(Population(replace(plan(open_rules()), networks_per_pass=4), networks(chosen)), batch)
    np.testing.assert_allclose(in_parts.fitted, together.fitted, rtol=1e-9)
    alone = Population(plan(open_rules()), networks(chosen[3:4]))
    own = measure(alone, Batch(batch.inputs[3:4], batch.labels[3:4]))
    np.testing.assert_allclose(own.fitted[0], together.fitted[3], rtol=1e-9)
    np.testing.assert_allclose(own.held_out[0], together.held_out[3], rtol=1e-9)


def test_networks_that_come_later_are_measured_at_their_own_widths() -> None:
    chosen = instances(14)
    first, other = next((one, two) for one in chosen for two in chosen if one.widths[0] != two.widths[0])
    population = Population(plan(open_rules()), networks([first]))
    meter = PromiseMeter(population)
    batch = Draws([other]).batch(EXAMPLES)
    meter.measure(batch, everywhere(population))
    population.replace(np.array([0]), networks([other]))
    expected = measure(Population(plan(open_rules()), networks([other])), batch)
    np.testing.assert_allclose(meter.measure(batch, everywhere(population)).fitted, expected.fitted, rtol=1e-9)


def test_slots_that_were_not_asked_for_are_left_out_and_change_nothing_for_others() -> None:
    chosen = instances(3)
    population, batch = Population(plan(open_rules()), networks(chosen)), Draws(chosen).batch(EXAMPLES)
    wanted = np.array([[False, True, True], [False, True, False], [False, False, False]])
    found, full = PromiseMeter(population).measure(batch, wanted), measure(population, batch)
    for some, every in ((found.fitted, full.fitted), (found.held_out, full.held_out)):
        assert np.isfinite(every[wanted]).any(axis=1).all()
        np.testing.assert_allclose(some[wanted], every[wanted], rtol=1e-9)
        assert np.isnan(some[~wanted]).all()


def test_measuring_changes_nothing() -> None:
    chosen = instances(4)
    population = Population(plan(open_rules()), networks(chosen))
    values, random = population.flat.values.detach().clone(), torch.get_rng_state()
    measure(population, Draws(chosen).batch(EXAMPLES))
    assert torch.equal(population.flat.values, values)
    assert torch.equal(torch.get_rng_state(), random)


def test_without_slots_nothing_is_promised() -> None:
    chosen = instances(2)
    population = Population(plan(open_rules()), networks(chosen))
    found = PromiseMeter(population).measure(Draws(chosen).batch(EXAMPLES), ~everywhere(population))
    assert np.isnan(found.fitted).all()
