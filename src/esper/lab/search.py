"""What one training under a controller is worth, in whole trainings of networks that never change.

Whoever has no controller searches: draw networks with a blueprint or none in every slot, train them from scratch, keep
the one that validates best. *Random search* (Bergstra and Bengio, 2012) trains each to the end; *successive halving*
(Jamieson and Talwalkar, 2016, arXiv:1502.07943) drops the worse half of four at a quarter and at half of the way. Both
may spend a multiple of the FLOPs that the controller's own training took on that instance. B is the multiple at which
they score as much as the controller; the controller has paid for its own training after cost / (B - 1) networks.

FLOPs are of training alone, for both: what a controller has measured (validation after every decision, contributions,
promises) is not charged, nor is a search's validation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from esper.engine.budget import TRAINING_PASSES, Budget
from esper.errors import ConfigError
from esper.growth.blueprints.registry import get
from esper.lab.evaluate import count_trainings, find_controller, sample_for_evaluation
from esper.lab.static_networks import Prices, examples_per_decision, measure_arm
from esper.lifecycle.actions import Blend, make_wait_actions
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.parameters import SeedKind
from esper.population.population import Fossils
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split, Suite
from esper.train.evaluation import COHORT, EvaluationConfig, evaluate_controllers
from esper.train.workers import DeviceTask, Workers

BUDGETS = (1, 2, 4, 8, 16)
"""Multiples of the FLOPs of the controller's one training."""
POOL = 32
"""Networks that are drawn for an instance; a search that has tried them all stops."""
BRACKET = 4
"""Networks that halve together."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Pool:
    """The networks drawn for N instances, K each, trained over T decisions."""

    validation: Floats
    """J on validation data after each decision, ``[N, K, T]``."""
    test: Floats
    """Score on test data at the end, ``[N, K]``."""
    flops: Floats
    """Of the training after each decision, the same for all, ``[N, K]``."""

    @property
    def decisions(self) -> int:
        """T."""
        return self.validation.shape[2]


def draw_fossils(suite: Suite, prices: Prices, budget: Budget, instance: Instance, rng: np.random.Generator) -> Fossils:
    """In every slot nothing, or one of the blueprints that serve it, all equally likely, as far as caps allow."""
    caps = np.array([np.inf if cap is None else cap for cap in (budget.parameters, budget.flops)])
    drawn: list[SeedKind] = []
    for slot, site in enumerate(prices.sites(instance)):
        kinds = [get(name) for name in suite.blueprints]
        choices = [None, *(index for index, kind in enumerate(kinds) if kind.supports(site))]
        choice = choices[int(rng.integers(len(choices)))]
        if choice is None:
            continue
        left = caps - [kinds[choice].parameters_at(site), kinds[choice].flops_at(site)]
        if (left >= 0).all():
            caps = left
            drawn.append(SeedKind(slot, choice, Blend.ADD))
    return tuple(drawn)


@dataclass(frozen=True)
class _PoolTask(DeviceTask):
    terms: EvaluationConfig
    instances: Sequence[Instance]
    fossils: Sequence[Fossils]

    @property
    def device(self) -> str:
        return self.terms.device


def train_pool(terms: EvaluationConfig, instances: Sequence[Instance], seed: int, workers: Workers) -> Pool:
    """Draw networks for every instance and train them all, side by side, within the controller's caps.

    Raises:
        ConfigError: there is a cap on memory, which is none of a network that never changes.
    """
    if terms.conduct.budget.memory is not None:
        raise ConfigError("a search knows no cap on memory: train with conduct.budget.parameters or flops instead")
    suite, rng = get_suite(terms.suite), numpy_generator(seed, Stream.STATIC_SEARCH)
    prices = Prices(suite)
    every = [instance for instance in instances for _ in range(POOL)]
    budget = terms.conduct.budget.within(suite.parameter_cap)
    fossils = [draw_fossils(suite, prices, budget, instance, rng) for instance in every]
    parts = [slice(start, start + COHORT) for start in range(0, len(every), COHORT)]
    results = workers.map(_train, [_PoolTask(terms, every[part], fossils[part]) for part in parts])
    shape = len(instances), POOL
    each = TRAINING_PASSES * examples_per_decision(suite)
    cost = [each * prices.network(*one) for one in zip(every, fossils, strict=True)]
    validation, test = (np.concatenate(parts) for parts in zip(*results, strict=True))
    return Pool(validation.reshape(*shape, -1), test.reshape(shape), np.array(cost, np.float64).reshape(shape))


def _train(task: _PoolTask) -> tuple[Floats, Floats]:
    """J on validation data after each decision ``[E, T]``, and scores on test data ``[E]``."""
    conduct = task.terms.conduct.model_copy(update={"promise": None, "plateau": None})
    terms = replace(task.terms, conduct=conduct)
    episodes = terms.create_episodes(task.instances, fossils=task.fossils)
    waiting, curve = make_wait_actions(len(task.instances)), list[Floats]()
    for _ in range(episodes.suite.steps):
        episodes.step(waiting)
        curve.append(episodes.potential)
    return np.stack(curve, 1), episodes.final_score().score


Search = Callable[[Pool, Floats], Floats]
"""Of a pool and FLOPs ``[N]``: the test score ``[N]`` of the network that is kept."""


def random_search(pool: Pool, flops: Floats) -> Floats:
    """One network after the other, as many as can be afforded, but one at least."""
    spent = np.cumsum(pool.flops * pool.decisions, axis=1)
    tried = np.maximum((spent <= flops[:, None]).sum(1), 1)
    return _keep_best(pool, np.arange(POOL) < tried[:, None])


def successive_halving(pool: Pool, flops: Floats) -> Floats:
    """Brackets of four, one after the other, as many as can be afforded, but one network at least."""
    decisions = pool.decisions
    quarter, half = max(decisions // 4, 1), max(decisions // 2, 1)
    rows = np.arange(len(flops))[:, None]
    left, finished = flops.copy(), np.zeros(pool.test.shape, bool)
    for start in range(0, POOL, BRACKET):
        four: Ints = np.tile(np.arange(start, start + BRACKET), (len(flops), 1))
        two = _best_of(pool.validation[..., quarter - 1], four, BRACKET // 2)
        one = _best_of(pool.validation[..., half - 1], two, 1)
        cost = (
            quarter * pool.flops[rows, four].sum(1)
            + (half - quarter) * pool.flops[rows, two].sum(1)
            + (decisions - half) * pool.flops[rows, one].sum(1)
        )
        affordable = cost <= left
        finished[rows[affordable], one[affordable]] = True
        left = np.where(affordable, left - cost, 0.0)
    finished[:, 0] |= ~finished.any(1)
    return _keep_best(pool, finished)


def _best_of(validation: Floats, among: Ints, count: int) -> Ints:
    """Of the networks ``among [N, n]`` those ``[N, count]`` that validate best."""
    order = np.argsort(-np.take_along_axis(validation, among, 1), axis=1, kind="stable")
    return np.take_along_axis(among, order[:, :count], 1)


def _keep_best(pool: Pool, tried: Bools) -> Floats:
    best = np.where(tried, pool.validation[..., -1], -np.inf).argmax(1)
    return pool.test[np.arange(len(best)), best]


SEARCHES: dict[str, Search] = {"random_search": random_search, "successive_halving": successive_halving}


@dataclass(frozen=True)
class SearchReport:
    """A controller beside searches on the same instances."""

    controller: str
    score: float
    """Mean test score under the controller."""
    scores: dict[str, dict[int, float]]
    """Mean test scores of the searches, by multiple of the FLOPs."""
    B: dict[str, float | None]
    """The multiple at which each reaches the controller; None: not with the largest."""
    B_interval: dict[str, tuple[float | None, float | None]]
    """95%, by resampling instances."""
    trainings: float
    """Whole trainings that the controller has cost."""
    break_even: float | None
    """Networks to be trained until the controller has paid, at the least B, or with the largest multiple where no
    search reaches it; None: it never does."""


def compare_with_search(
    controller: str, scores: Floats, flops: Floats, pool: Pool, trainings: float, seed: int
) -> SearchReport:
    """The controller's test scores and training FLOPs ``[N]`` beside what searches make of the pool."""
    curves = {name: np.stack([search(pool, b * flops) for b in BUDGETS]) for name, search in SEARCHES.items()}
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(scores), size=(RESAMPLES, len(scores)))
    multiples = {name: find_multiple(own.mean(1), float(scores.mean())) for name, own in curves.items()}
    intervals: dict[str, tuple[float | None, float | None]] = {}
    for name, own in curves.items():
        drawn = [find_multiple(own[:, rows].mean(1), float(scores[rows].mean())) for rows in chosen]
        low, high = np.quantile([np.inf if one is None else one for one in drawn], (0.025, 0.975), method="nearest")
        intervals[name] = _finite(low), _finite(high)
    finite = [one for one in multiples.values() if one is not None]
    least = min(finite) if finite else float(BUDGETS[-1])
    return SearchReport(
        controller,
        float(scores.mean()),
        {name: dict(zip(BUDGETS, own.mean(1).tolist(), strict=True)) for name, own in curves.items()},
        multiples,
        intervals,
        trainings,
        trainings / (least - 1) if least > 1 else None,
    )


def search_beside(name: str, suite: Suite, split: Split, count: int, seed: int, workers: Workers) -> SearchReport:
    """A controller and searches on so many of the suite's instances, which the seed draws.

    Raises:
        ConfigError: there is no such controller.
        TaskError: the suite has no families for that split.
        RunError, CheckpointError: the run is unusable.
    """
    controller, terms = find_controller(name, suite)
    trainings = count_trainings(name, suite)
    instances = sample_for_evaluation(suite, split, count, seed)
    played = measure_arm(evaluate_controllers(workers, [controller], terms, instances)[0], suite)
    scores = np.array([one.score for one in played.outcomes])
    pool = train_pool(terms, instances, seed, workers)
    flops = np.array(played.flops, np.float64)
    return compare_with_search(name, scores, flops, pool, trainings, seed)


def find_multiple(means: Floats, score: float) -> float | None:
    """Where the line through the mean scores at `BUDGETS`, over their logarithm, first reaches ``score``; 1 at least.

    None: nowhere.
    """
    reached = means >= score
    if not reached.any():
        return None
    place = int(reached.argmax())
    if place == 0:
        return float(BUDGETS[0])
    below, above = means[place - 1], means[place]
    share = (score - below) / (above - below)
    return float(BUDGETS[place - 1] * (BUDGETS[place] / BUDGETS[place - 1]) ** share)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
