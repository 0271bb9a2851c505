"""What a search over static networks needs to equal a controller."""

import numpy as np
import pytest

from esper.control.rules import Schedule
from esper.engine.budget import Budget
from esper.engine.engine import GrowthConfig
from esper.errors import ConfigError, TaskError
from esper.growth.blueprints.registry import get
from esper.lab.analysis import mean_interval
from esper.lab.evaluate import count_trainings
from esper.lab.experiment import FINALISTS, search_sequence
from esper.lab.search import (
    BRACKET,
    BUDGETS,
    POOL,
    Pool,
    compare_with_search,
    draw_fossils,
    find_multiple,
    random_search,
    search_beside,
    successive_halving,
    train_pool,
)
from esper.lab.static_networks import Prices, StaticNetwork, train_static
from esper.lifecycle.rules import Rules
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.population import Fossils
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig
from esper.train.workers import LocalWorkers
from lab.arms.planting import TERMS

FAMILIES = ("even", "odd") * 4


def pool_of(final: np.ndarray, flops: float = 1.0, decisions: int = 8) -> Pool:
    """Networks whose curves are flat: test score and validation are the same."""
    validation = np.repeat(final[..., None], decisions, axis=2)
    return Pool(validation, final, np.full(final.shape, flops))


def rising(networks: int = 3) -> np.ndarray:
    """The later a network is drawn, the better it is."""
    return np.tile(np.linspace(0, 1, POOL), (networks, 1))


@pytest.mark.landing
def test_random_search_keeps_the_best_of_what_it_can_afford() -> None:
    pool = pool_of(rising())
    for tried in (1, 2, 5, POOL):
        assert random_search(pool, np.full(3, 8.0 * tried)) == pytest.approx(rising()[:, tried - 1])
    assert random_search(pool, np.full(3, 0.5)) == pytest.approx(rising()[:, 0]), "one at least"
    assert random_search(pool, np.full(3, 1e9)) == pytest.approx(1.0)
    misled = Pool(-pool.validation, pool.test, pool.flops)
    assert random_search(misled, np.full(3, 1e9)) == pytest.approx(0.0), "scored on test data, kept by validation"


@pytest.mark.landing
def test_halving_trains_four_for_a_quarter_two_for_half_and_one_to_the_end() -> None:
    """4 x 2 + 2 x 2 + 1 x 4 decisions of 8: two whole trainings for the best of four."""
    pool = pool_of(rising())
    for brackets in (1, 2, POOL // BRACKET):
        assert successive_halving(pool, np.full(3, 16.0 * brackets)) == pytest.approx(
            rising()[:, brackets * BRACKET - 1]
        )
    assert successive_halving(pool, np.full(3, 15.9)) == pytest.approx(rising()[:, 0]), "no bracket can be afforded"
    # What begins badly is dropped.
    pool = pool_of(rising(1))
    pool.validation[:, BRACKET - 1, :3] = -1.0
    assert successive_halving(pool, np.full(1, 16.0)) == pytest.approx(rising(1)[:, BRACKET - 2])
    # With three decisions, a quarter is the first one, and not the last.
    pool = pool_of(rising(1), decisions=3)
    pool.validation[:, BRACKET - 1, 0] = -1.0
    assert successive_halving(pool, np.full(1, 100.0))[0] == pytest.approx(rising(1)[0, -1])
    assert successive_halving(pool, np.full(1, 7.0)) == pytest.approx(rising(1)[:, BRACKET - 2])


@pytest.mark.landing
def test_b_is_where_the_line_through_the_scores_reaches_the_controller() -> None:
    means = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    assert find_multiple(means, 0.7) == pytest.approx(4.0)
    assert find_multiple(means, 0.65) == pytest.approx(2 * 2**0.5)
    assert find_multiple(means, 0.4) == 1.0
    assert find_multiple(means, 0.95) is None


@pytest.mark.landing
def test_a_controller_pays_after_its_cost_over_what_a_network_saves() -> None:
    pool = pool_of(rising(8))
    scores = np.full(8, rising()[0, 3])  # what four trainings reach
    found = compare_with_search("policy", scores, np.full(8, 8.0), pool, 300.0, FAMILIES)
    assert found.B["random_search"] == pytest.approx(4.0)
    assert found.B["successive_halving"] == pytest.approx(2.0)
    assert found.break_even == pytest.approx(300.0)
    assert found.scores["random_search"] == pytest.approx({b: rising()[0, b - 1] for b in BUDGETS})
    low, high = found.B_interval["random_search"]
    assert low == pytest.approx(4.0)
    assert high == pytest.approx(4.0)
    never = compare_with_search("policy", np.full(8, -1.0), np.full(8, 8.0), pool, 300.0, FAMILIES)
    assert never.break_even is None
    beyond = compare_with_search("policy", np.full(8, 2.0), np.full(8, 8.0), pool, 300.0, FAMILIES)
    assert beyond.B == {"random_search": None, "successive_halving": None}
    assert beyond.break_even == pytest.approx(300 / 15)


@pytest.mark.landing
def test_b_lies_between_where_the_search_is_no_longer_worse_and_where_it_is_as_good() -> None:
    """At each multiple the interval of the difference, on the same instances, is that of every other comparison."""
    rng = np.random.default_rng(3)
    pool = pool_of(rising(8) + rng.normal(0, 0.05, (8, POOL)))
    scores = rising(8)[:, 3] + rng.normal(0, 0.05, 8)
    found = compare_with_search("policy", scores, np.full(8, 8.0), pool, 300.0, FAMILIES)
    leads = [mean_interval((random_search(pool, b * np.full(8, 8.0)) - scores)[None], FAMILIES) for b in BUDGETS]
    low, high = found.B_interval["random_search"]
    assert (low, high) == (
        find_multiple(np.array([lead.high for lead in leads]), 0.0),
        find_multiple(np.array([lead.low for lead in leads]), 0.0),
    )
    assert low is not None
    assert high is not None
    assert low < found.B["random_search"] < high


@pytest.mark.landing
def test_a_pool_is_trained_as_static_networks_are() -> None:
    suite, terms = get_suite("short"), EvaluationConfig("short", Rules())
    instances = suite.sample(2, "heldout", np.random.default_rng(0))
    with LocalWorkers(1) as workers:
        pool = train_pool(terms, instances, 3, workers)
        again = train_pool(terms, instances, 3, workers)
        rng_networks = [
            StaticNetwork(instance, fossils, suite.steps)
            for instance, fossils in zip([instances[0]] * 4, drawn(3, instances[0], 4), strict=True)
        ]
        apart = [one for one, _ in train_static(workers, terms, "static", rng_networks)]
    assert np.array_equal(pool.test, again.test)
    assert pool.validation.shape == (2, POOL, suite.steps)
    assert pool.test[0, :4] == pytest.approx([one.score for one in apart], abs=1e-6)
    assert pool.flops[0, :4] * suite.steps == pytest.approx([float(one.flops or 0) for one in apart])
    assert len(set(pool.flops[0].tolist())) > 3


def drawn(seed: int, instance: Instance, count: int) -> list[Fossils]:
    suite = get_suite("short")
    rng, prices = numpy_generator(seed, Stream.STATIC_SEARCH), Prices(suite)
    return [draw_fossils(suite, prices, Budget(), instance, rng) for _ in range(count)]


def count_parameters(network: Fossils, suite: Suite, instance: Instance) -> int:
    """Parameters of the fossils."""
    sites, kinds = Prices(suite).count(instance)[0], [get(name) for name in suite.blueprints]
    return sum(kinds[one.blueprint].cost_at(sites[one.slot]).parameters for one in network)


@pytest.mark.landing
def test_every_choice_is_drawn_in_every_slot_and_caps_hold() -> None:
    suite, rng = get_suite("tokens"), np.random.default_rng(0)
    instance, prices = suite.sample(1, "heldout", rng)[0], Prices(suite)
    networks = [draw_fossils(suite, prices, Budget(), instance, rng) for _ in range(300)]
    places = {(seed.slot, seed.blueprint) for network in networks for seed in network}
    assert places == {(slot, kind) for slot in range(len(suite.sites)) for kind in range(len(suite.blueprints))}
    assert {len(network) for network in networks} == {0, 1, 2, 3}
    host = prices.network(instance, ())
    assert all(draw_fossils(suite, prices, Budget(parameters=0), instance, rng) == () for _ in range(20))
    free = [draw_fossils(suite, prices, Budget(flops=0), instance, rng) for _ in range(20)]
    assert {prices.network(instance, network) for network in free} == {host}, "elementwise modules cost no FLOPs"
    some = [draw_fossils(suite, prices, Budget(parameters=100), instance, rng) for _ in range(100)]
    assert {len(network) for network in some} >= {0, 1}
    assert max(count_parameters(network, suite, instance) for network in some) <= 100
    flops = [draw_fossils(suite, prices, Budget(flops=2000), instance, rng) for _ in range(100)]
    assert 0 < max(prices.network(instance, network) - host for network in flops) <= 2000


@pytest.mark.landing
def test_a_controller_beside_searches() -> None:
    with LocalWorkers(1) as workers:
        found = search_beside("look", get_suite("short"), "heldout", 3, 0, workers)
    tokens = get_suite("tokens")
    assert [count_trainings(name, tokens) for name in ("none", "heuristic")] == [0, 203_490 / tokens.steps]
    assert found.controller == "look"
    assert set(found.B) == {"random_search", "successive_halving"}
    assert list(found.scores["random_search"]) == list(BUDGETS)
    with LocalWorkers(1) as workers, pytest.raises(ConfigError, match="no controller 'lock'"):
        search_beside("lock", get_suite("short"), "heldout", 3, 0, workers)
    with LocalWorkers(1) as workers, pytest.raises(TaskError, match="has no families for the split"):
        search_beside("look", get_suite("generated:4"), "transfer", 3, 0, workers)


@pytest.mark.landing
def test_a_pool_plays_under_the_controllers_caps_but_ends_by_its_horizon_alone() -> None:
    suite = get_suite("short")
    instances = suite.sample(2, "heldout", np.random.default_rng(0))
    with LocalWorkers(1) as workers:
        usual = train_pool(EvaluationConfig("short", Rules()), instances, 3, workers)
        growth = GrowthConfig(plateau=1)
        stalling = train_pool(EvaluationConfig("short", Rules(), growth), instances, 3, workers)
        capped = train_pool(
            EvaluationConfig("short", Rules(), GrowthConfig(budget=Budget(parameters=0))), instances, 3, workers
        )
        memory = GrowthConfig(budget=Budget(memory=10))
        with pytest.raises(ConfigError, match="a search does not support growth.budget.memory"):
            train_pool(EvaluationConfig("short", Rules(), memory), instances, 3, workers)
    assert np.array_equal(usual.validation, stalling.validation)
    assert len(set(capped.flops[0].tolist())) == 1


# The search for a fixed sequence spends a policy's budget, never more, and follows from its seed.


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.lab.experiment.FIRST_ROUND", 3)


def searched(environment_steps: int, seed: int = 0) -> tuple[Schedule, int, list[int]]:
    spent: list[int] = []
    with LocalWorkers(1) as workers:
        return *search_sequence(TERMS, environment_steps, seed, workers, spent.append), spent


@pytest.mark.parametrize("episodes", [1, 8, 23, 61])
def test_the_budget_is_spent_but_for_less_than_an_episode_per_finalist(episodes: int) -> None:
    steps = get_suite("short").steps
    budget = episodes * steps + 3
    _, taken, spent = searched(budget)
    assert len(spent) == (1 if episodes < 24 else 2), "rounds"
    assert sum(spent) == taken <= budget
    assert budget - taken < FINALISTS * steps + 3 + 1
    sequence, taken, spent = searched(steps - 1)
    assert (taken, spent, sequence.plantings) == (0, [], ()), "less than an episode"


@pytest.mark.landing
def test_a_seed_has_a_search_of_its_own() -> None:
    budget = 30 * get_suite("short").steps
    first, again, other = (searched(budget, seed)[0] for seed in (1, 1, 2))
    assert first.plantings == again.plantings
    assert first.plantings != other.plantings
