"""What seeds earn in a population: equal to networks with seeds switched off by hand, and right about planted ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation
from esper.numerics.arrays import Bools, Floats
from esper.population.evaluation import Variants, evaluate, forward_variants
from esper.population.forward import ActiveSeeds, select_blended, select_committed
from esper.population.learning import Batch, compute_accuracies, compute_losses
from esper.population.population import NetworkSpec, Population, PopulationConfig, Strategy
from esper.population.shapley import (
    ACCURACY,
    LOSS,
    Attribution,
    ValueFunction,
    attribute_networks,
    solve_by_pairs,
    solve_by_sampling,
    solve_exactly,
)
from esper.tasks.token_suite import TokenLayer
from factories import Chain, InputSkip, Layer, Residual, make_small_population
from population.planted_seeds import planted_seeds
from population.scenes import draw_small, good_measurements, grow_small, grown
from reference_population import ReferencePopulation

pytestmark = pytest.mark.landing

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def by_hand(slow: ReferencePopulation, batch: Batch, network: int, players: Bools) -> ValueFunction:
    """The worth function of one network, for accuracy and minus loss: a separate pass for every coalition."""
    slots = np.flatnonzero(players)

    def worth(coalitions: Bools) -> Floats:
        found: list[list[float]] = []
        for coalition in coalitions:
            off = {where: 0.0 for where in slow.seeds if where[0] == network and not players[where[1]]}
            off |= {(network, slot): 0.0 for slot in slots[~coalition]}
            logits = slow.logits(batch.inputs, off)[[network]]
            own = batch.labels[[network]]
            found.append([float(compute_accuracies(logits, own)), -float(compute_losses(logits, own))])
        return np.array(found).T

    return worth


def assert_as_by_hand(found: Attribution, slow: ReferencePopulation, batch: Batch, participation: ActiveSeeds):
    for network, players in enumerate(participation.slots):
        expected = solve_exactly(by_hand(slow, batch, network, players), players.sum())
        np.testing.assert_allclose(found.values[:, network, players], expected.values, **TOLERANCE)
        assert (found.values[:, network, ~players] == 0).all()
        places = np.ix_([ACCURACY, LOSS], [network], players.nonzero()[0], players.nonzero()[0])
        np.testing.assert_allclose(found.interactions[places][:, 0], expected.interactions, **TOLERANCE)
        np.testing.assert_allclose(found.host_value[:, network], expected.empty_value, **TOLERANCE)
        np.testing.assert_allclose(found.full_value[:, network], expected.grand_value, **TOLERANCE)
    assert (found.errors == 0).all()
    assert (found.players == participation.slots).all()


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.parametrize("isolation", [Isolation.NONE, Isolation.SHADOW])
def test_values_are_those_of_separate_passes(isolation: Isolation, strategy: Strategy) -> None:
    fast, slow, batch = grown(isolation, strategy)
    assert len(set(fast.table.blended.sum(axis=1))) >= 2, "the test means networks of different players"
    for participation in (select_blended(fast), select_committed(fast)):
        for shares in (True, False):
            fast.shares_prefixes = shares
            found = attribute_networks(fast, batch, rng(), participation)
            assert np.abs(found.values[LOSS]).max() > 1e-3
            assert_as_by_hand(found, slow, batch, participation)


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.parametrize("kind", [Chain, Residual, InputSkip])
def test_values_are_exact_whatever_connections_a_host_has(kind: type[Chain], strategy: Strategy) -> None:
    shared, hosts = make_small_population(kind, 3)
    fast, slow = grow_small(replace(shared, strategy=strategy), hosts)
    batch = draw_small(40, 9)
    found = attribute_networks(fast, batch, rng())
    assert np.abs(found.values[LOSS][fast.table.owning]).min() > 1e-6
    assert_as_by_hand(found, slow, batch, select_blended(fast))


def test_values_add_up_and_the_whole_is_what_an_evaluation_says() -> None:
    fast, _, batch = grown(Isolation.NONE, "stacked")
    found, evaluation = attribute_networks(fast, batch, rng()), evaluate(fast, batch)
    np.testing.assert_allclose(found.values.sum(-1), found.full_value - found.host_value, **TOLERANCE)
    np.testing.assert_allclose(found.full_value, [evaluation.accuracy, -evaluation.loss], **TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 24, 10_000])
@pytest.mark.parametrize("at_once", [1, 3])
def test_memory_is_bounded_without_a_change(monkeypatch: pytest.MonkeyPatch, chunk: int, at_once: int) -> None:
    fast, _, batch = grown(Isolation.NONE, "stacked")
    whole = attribute_networks(fast, batch, rng())
    monkeypatch.setattr("esper.population.shapley.EVALUATION_CHUNK", chunk)
    monkeypatch.setattr("esper.population.shapley.VARIANTS_AT_ONCE", at_once)
    seen = batch_sizes(monkeypatch)
    found = attribute_networks(fast, batch, rng())
    np.testing.assert_allclose(found.values, whole.values, **TOLERANCE)
    assert max(seen) <= max(chunk, at_once)


def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that the hosts' layers get from now on."""
    seen: list[int] = []
    activate = TokenLayer.activate

    def watched(self: TokenLayer, features: Tensor) -> Tensor:
        seen.append(features.shape[-3])
        return activate(self, features)

    monkeypatch.setattr(TokenLayer, "activate", watched)
    return seen


def test_the_host_computes_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    population, batch, *_ = planted_seeds()
    few = Batch(batch.inputs[:, :20], batch.labels[:, :20])
    seen = batch_sizes(monkeypatch)
    attribute_networks(population, few, rng())
    assert seen == [20, 40, 80]  # the head, behind the last slot, gets 160


def test_planted_seeds_are_ranked_rightly() -> None:
    population, batch, useful, useless, harmful = planted_seeds()
    found, networks = attribute_networks(population, batch, rng()), np.arange(population.size)
    for values, least in ((found.values[ACCURACY], 0.05), (found.values[LOSS], 0.1)):
        assert (values[networks, useful] > least).all()
        assert (values[networks, useless] == 0).all()
        assert (values[networks, harmful] < -least).all()


class Deep(nn.Module):
    """More slots than all coalitions can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            self.add_module(f"layer{number}", Layer(4))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.Sequential(*self.children())(inputs)


def deep(counts: list[int]) -> tuple[Population, ReferencePopulation]:
    """Networks of 8 slots with so many seeds, from the last slot back, that all have something to say.

    What a network is like follows from its place in `counts` from the end.
    """
    slots = tuple(f"layer{number}" for number in range(8))
    shared = PopulationConfig(Deep(), slots, ("mlp",), torch.zeros(2, 4), dtype=torch.float64)
    hosts = [NetworkSpec(stirred(Deep(), count), (4,) * 8, 0.05, count) for count in counts]
    fast, slow = Population(shared, hosts), ReferencePopulation(shared, hosts)
    rows = [
        [make_action(Op.GERMINATE, 7 - seed, 0) if seed < count else make_wait_actions(1)[0] for count in counts]
        for seed in range(8)
    ]
    for actions in [*map(np.stack, rows), *[make_wait_actions(len(counts))] * 5]:
        for population in (fast, slow):
            population.measurements = good_measurements(fast)
            population.decide(actions)
    for (slot, _, _), bank in fast.banks.items():
        for row, owner in enumerate(bank.block.owners.tolist()):
            seed = slow.seeds[owner, slot].blueprint
            stirred(seed, 100 * counts[owner] + slot)
            with torch.no_grad():
                bank.block.values[row] = bank.block.layout.flatten_module(seed)
    return fast, slow


def stirred(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def test_many_seeds_are_estimated_and_few_are_exact_whoever_else_is_there() -> None:
    counts = [3, 8, 6, 7]
    fast, slow = deep(counts)
    batch = draw_small(30, 4, 1)
    batch = Batch(batch.inputs.repeat(4, 1, 1), batch.labels.repeat(4, 1))
    found = attribute_networks(fast, batch, rng(7), pairs=3)
    for network, (count, players) in enumerate(zip(counts, fast.table.blended, strict=True)):
        assert players.sum() == count
        if count <= 6:
            expected = solve_exactly(by_hand(slow, batch, network, players), count)
            assert (found.errors[:, network] == 0).all()
            assert np.isfinite(found.interactions[:, network]).all()
            np.testing.assert_allclose(found.values[:, network, players], expected.values, **TOLERANCE)
        else:
            everywhere = by_hand_everywhere(by_hand(slow, batch, network, players), players)
            expected = solve_by_sampling(everywhere, 8, rng(7), 3)
            assert np.isnan(found.interactions[:, network]).all()
            np.testing.assert_allclose(found.values[:, network], expected.values, **TOLERANCE)
            np.testing.assert_allclose(found.errors[:, network], expected.errors, **TOLERANCE)
            assert (found.errors[LOSS, network, players] > 0).all()
            assert (found.values[:, network, ~players] == 0).all()
        alone = attribute_networks(deep([count])[0], Batch(batch.inputs[:1], batch.labels[:1]), rng(7), pairs=3)
        np.testing.assert_allclose(found.values[:, network], alone.values[:, 0], **TOLERANCE)
    np.testing.assert_allclose(found.values.sum(-1), found.full_value - found.host_value, **TOLERANCE)


def test_estimates_compute_no_more_than_the_coalitions_of_their_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(population: Population, variants: Variants, inputs: Tensor) -> Tensor:
        computed.append(len(variants.toggled) * inputs.shape[1])
        return forward_variants(population, variants, inputs)

    monkeypatch.setattr("esper.population.shapley.forward_variants", counted)
    batch = draw_small(30, 4, 1)
    pairs, seeds = 3, 8
    attribute_networks(deep([seeds])[0], batch, rng(7), pairs=pairs)
    # The coalitions of nobody and of everybody are those of all orders.
    assert sum(computed) <= (2 * pairs * (seeds - 1) + 2) * 30


def test_pairs_of_many_seeds_are_those_of_separate_passes() -> None:
    counts = [3, 8, 7]
    fast, slow = deep(counts)
    batch = draw_small(30, 4, 1)
    batch = Batch(batch.inputs.repeat(3, 1, 1), batch.labels.repeat(3, 1))
    found = attribute_networks(fast, batch, None)
    for network, (count, players) in enumerate(zip(counts, fast.table.blended, strict=True)):
        expected = (solve_exactly if count <= 6 else solve_by_pairs)(by_hand(slow, batch, network, players), count)
        np.testing.assert_allclose(found.values[:, network, players], expected.values, **TOLERANCE)
        np.testing.assert_array_equal(found.errors[:, network, players], expected.errors)
        pairs = found.interactions[:, network][:, players][..., players]
        np.testing.assert_allclose(pairs, expected.interactions, **TOLERANCE)
        assert (found.values[:, network, ~players] == 0).all()
        np.testing.assert_allclose(found.host_value[:, network], expected.empty_value, **TOLERANCE)


def by_hand_everywhere(worth: ValueFunction, players: Bools) -> ValueFunction:
    """The same game with those who do not exist as players too."""
    return lambda coalitions: worth(coalitions[:, players])
