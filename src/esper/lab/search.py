"""The value of a controller: how many trainings of fixed networks replace one training with the controller.

A search draws networks with a blueprint or none in every slot, trains them from scratch, and keeps the best in
validation. *Random search* (Bergstra and Bengio, 2012) trains each to the end; *successive halving* (Jamieson and
Talwalkar, 2016, arXiv:1502.07943) drops the worse half of four after a quarter and after half of the training. B is the
multiple of the FLOPs of training with the controller at which a search scores as high; the controller has paid for its
own training after cost / (B - 1) networks. FLOPs are those of training only, without measurements and validation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.engine.budget import TRAINING_PASSES, Budget
from esper.errors import ConfigError
from esper.growth.blueprints.registry import get
from esper.lab.analysis import mean_interval
from esper.lab.evaluate import count_trainings, find_controller, sample_for_evaluation
from esper.lab.static_networks import Prices, StaticNetwork, measure_arm, train_static
from esper.lifecycle.actions import Blend
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.parameters import SeedKind
from esper.population.population import Fossils
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split, Suite
from esper.train.evaluation import EvaluationConfig, evaluate_controllers
from esper.train.workers import Workers

BUDGETS = (1, 2, 4, 8, 16)
"""Multiples of the FLOPs of one training with the controller."""
POOL = 32
"""Number of networks drawn for an instance; a search that has tried them all stops."""
BRACKET = 4
"""Number of networks in a bracket of successive halving."""


@dataclass(frozen=True)
class Pool:
    """The networks drawn for N instances, K each, trained over T decisions."""

    validation: Floats
    """J on validation data after each decision of N instances' K networks, ``[N, K, T]``."""
    test: Floats
    """Score on test data at the end, ``[N, K]``."""
    flops: Floats
    """FLOPs of the training after each decision, which are the same for all decisions, ``[N, K]``."""


@dataclass(frozen=True)
class SearchReport:
    """A controller compared with searches on the same instances."""

    controller: str
    score: float
    """Mean test score with the controller."""
    scores: dict[str, dict[int, float]]
    """Mean test scores of the searches, by multiple of the FLOPs."""
    B: dict[str, float | None]
    """The multiple at which each search scores as much; None: not even at the largest."""
    B_interval: dict[str, tuple[float | None, float | None]]
    """Where a search does not differ significantly, at 95%; None: beyond the largest multiple."""
    trainings: float
    """Cost of the controller, in complete trainings."""
    break_even: float | None
    """Number of networks until the controller has paid for itself, at the smallest B or else the largest multiple;
    None: never."""


def search_beside(name: str, suite: Suite, split: Split, count: int, seed: int, workers: Workers) -> SearchReport:
    """Compare a controller with searches on ``count`` instances of the suite."""
    controller, config = find_controller(name, suite)
    trainings = count_trainings(name, suite)
    instances = sample_for_evaluation(suite, split, count, seed)
    played = measure_arm(evaluate_controllers(workers, [controller], config, instances)[0], suite)
    scores = np.array([result.score for result in played.outcomes])
    pool = train_pool(config, instances, seed, workers)
    families = [instance.family for instance in instances]
    return compare_with_search(name, scores, np.array(played.flops, np.float64), pool, trainings, families)


# The pool


def draw_fossils(suite: Suite, prices: Prices, budget: Budget, instance: Instance, rng: np.random.Generator) -> Fossils:
    """Draw for every slot, from the input on, nothing or one of the blueprints that support it, equally likely.

    A slot stays empty if its blueprint would exceed the caps.
    """
    left = np.array([np.inf if cap is None else cap for cap in (budget.parameters, budget.flops)])
    fossils: list[SeedKind] = []
    kinds = [get(name) for name in suite.blueprints]
    for slot, site in enumerate(prices.count(instance)[0]):
        choices = [None, *(index for index, kind in enumerate(kinds) if kind.supports(site))]
        choice = choices[int(rng.integers(len(choices)))]
        if choice is None:
            continue
        cost = kinds[choice].cost_at(site)
        if (left - cost >= 0).all():
            left = left - cost
            fossils.append(SeedKind(slot, choice, Blend.ADD))
    return tuple(fossils)


def train_pool(config: EvaluationConfig, instances: Sequence[Instance], seed: int, workers: Workers) -> Pool:
    """Draw networks for every instance within the controller's caps, and train them all."""
    if config.growth.budget.memory is not None:
        raise ConfigError("a search does not support growth.budget.memory: use budget.parameters or budget.flops")
    suite, rng = get_suite(config.suite), numpy_generator(seed, Stream.STATIC_SEARCH)
    prices, budget = Prices(suite), config.growth.budget.within(suite.parameter_cap)
    networks = [
        StaticNetwork(instance, draw_fossils(suite, prices, budget, instance, rng), suite.steps)
        for instance in instances
        for _ in range(POOL)
    ]
    trained = train_static(workers, config, "pool", networks)
    shape = len(instances), POOL
    scores = np.array([result.score for result, _ in trained])
    # A decision costs the same in all of a training, also where the governor has ended it.
    each = TRAINING_PASSES * prices.examples
    flops = np.array([each * prices.network(one.instance, one.fossils) for one in networks], np.float64)
    validation = np.stack([curve for _, curve in trained])
    return Pool(validation.reshape(*shape, -1), scores.reshape(shape), flops.reshape(shape))


# The searches


def random_search(pool: Pool, flops: Floats) -> Floats:
    """Train one network after the other, as many as the FLOPs allow, but at least one."""
    spent = np.cumsum(pool.flops * pool.validation.shape[2], axis=1)
    tried = np.maximum((spent <= flops[:, None]).sum(1), 1)
    return _keep_best(pool, np.arange(POOL) < tried[:, None])


def successive_halving(pool: Pool, flops: Floats) -> Floats:
    """Brackets of four networks, as many as the FLOPs allow, but at least one network."""
    decisions = pool.validation.shape[2]
    quarter, half = max(decisions // 4, 1), max(decisions // 2, 1)
    rows = np.arange(len(flops))[:, None]

    def select_best(decision: int, candidates: Ints, count: int) -> Ints:
        """The ``count`` best of ``candidates [N, n]`` by validation after ``decision``, ``[N, count]``."""
        validation = np.take_along_axis(pool.validation[..., decision - 1], candidates, 1)
        order = np.argsort(-validation, axis=1, kind="stable")
        return np.take_along_axis(candidates, order[:, :count], 1)

    left, finished = flops.copy(), np.zeros(pool.test.shape, bool)
    for start in range(0, POOL, BRACKET):
        four: Ints = np.tile(np.arange(start, start + BRACKET), (len(flops), 1))
        two = select_best(quarter, four, BRACKET // 2)
        winner = select_best(half, two, 1)
        cost = (
            quarter * pool.flops[rows, four].sum(1)
            + (half - quarter) * pool.flops[rows, two].sum(1)
            + (decisions - half) * pool.flops[rows, winner].sum(1)
        )
        affordable = cost <= left
        finished[rows[affordable], winner[affordable]] = True
        left = np.where(affordable, left - cost, 0.0)
    # The first network is trained even if no bracket can be afforded.
    finished[:, 0] |= ~finished.any(1)
    return _keep_best(pool, finished)


def _keep_best(pool: Pool, tried: Bools) -> Floats:
    best = np.where(tried, pool.validation[..., -1], -np.inf).argmax(1)
    return pool.test[np.arange(len(best)), best]


SEARCHES: dict[str, Callable[[Pool, Floats], Floats]] = {
    "random_search": random_search,
    "successive_halving": successive_halving,
}
"""Each maps a pool and FLOPs ``[N]`` to the test scores ``[N]`` of the networks that are kept."""


# The comparison


def compare_with_search(
    controller: str, scores: Floats, flops: Floats, pool: Pool, trainings: float, families: Sequence[str]
) -> SearchReport:
    """Compare the controller's test scores and training FLOPs ``[N]``, N at least 2, with searches in the pool."""
    curves = {name: np.stack([search(pool, b * flops) for b in BUDGETS]) for name, search in SEARCHES.items()}
    multiples = {name: find_multiple(curve.mean(1), float(scores.mean())) for name, curve in curves.items()}

    # An interval starts where the search is no longer significantly worse, and ends where it is significantly better,
    # by the interval of the difference on the same instances at each multiple.
    intervals: dict[str, tuple[float | None, float | None]] = {}
    for name, curve in curves.items():
        leads = [mean_interval((found - scores)[None], families) for found in curve]
        low = find_multiple(np.array([lead.high for lead in leads]), 0.0)
        high = find_multiple(np.array([lead.low for lead in leads]), 0.0)
        intervals[name] = low, high

    # The better search determines when the controller has paid for itself.
    least = min((multiple for multiple in multiples.values() if multiple is not None), default=float(BUDGETS[-1]))
    return SearchReport(
        controller=controller,
        score=float(scores.mean()),
        scores={name: dict(zip(BUDGETS, curve.mean(1).tolist(), strict=True)) for name, curve in curves.items()},
        B=multiples,
        B_interval=intervals,
        trainings=trainings,
        break_even=trainings / (least - 1) if least > 1 else None,
    )


def find_multiple(means: Floats, score: float) -> float | None:
    """Where the mean scores first reach ``score``, interpolated in the multiple's logarithm; None if never."""
    reached = means >= score
    if not reached.any():
        return None
    place = int(reached.argmax())
    if place == 0:
        return float(BUDGETS[0])
    below, above = means[place - 1], means[place]
    share = (score - below) / (above - below)
    return float(BUDGETS[place - 1] * (BUDGETS[place] / BUDGETS[place - 1]) ** share)
