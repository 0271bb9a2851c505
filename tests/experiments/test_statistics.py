"""Intervals cover the truth as often as they claim, and tests raise false alarms no more often than they may."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from esper.experiments import statistics
from esper.experiments.statistics import (
    LEVEL,
    bootstrap_interval,
    holm,
    interquartile_mean,
    paired_difference,
    paired_permutation_p,
    probability_of_improvement,
)

STUDIES = 400
FAMILY_MEANS = {"easy": 0.9, "middling": 0.6, "hard": 0.2}
PER_FAMILY = 12
FAMILIES = [family for family in FAMILY_MEANS for _ in range(PER_FAMILY)]
NOISE = 0.05


def slack(rate: float) -> float:
    """Three standard errors of a rate seen in so many studies."""
    return 3 * np.sqrt(rate * (1 - rate) / STUDIES)


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 800)
    monkeypatch.setattr(statistics, "PERMUTATIONS", 199)


def scores(rng: np.random.Generator) -> NDArray[np.float64]:
    """Skewed noise about the means of the families, which differ far more than the noise."""
    means = np.repeat(list(FAMILY_MEANS.values()), PER_FAMILY)
    return means + NOISE * (rng.exponential(size=len(means)) - 1)


def test_intervals_of_the_mean_cover_the_truth_as_often_as_they_claim():
    rng = np.random.default_rng(0)
    truth = np.mean(list(FAMILY_MEANS.values()))
    found = [bootstrap_interval(scores(rng), FAMILIES, rng) for _ in range(STUDIES)]
    coverage = np.mean([one.low <= truth <= one.high for one in found])
    assert abs(coverage - LEVEL) < slack(LEVEL) + 0.01  # skewed noise costs a little


def test_families_do_not_widen_the_interval():
    rng = np.random.default_rng(1)
    values = scores(rng)
    stratified = bootstrap_interval(values, FAMILIES, rng)
    pooled = bootstrap_interval(values, ["any"] * len(values), rng)
    assert pooled.high - pooled.low > 3 * (stratified.high - stratified.low)


def test_the_width_is_unbiased_in_tiny_strata(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 20_000)
    rng = np.random.default_rng(2)
    strata = [str(index // 2) for index in range(400)]
    found = bootstrap_interval(rng.normal(size=400), strata, rng)
    width = 2 * stats.norm.ppf(0.5 + LEVEL / 2) / np.sqrt(400)
    assert found.high - found.low == pytest.approx(width, rel=0.12)  # without the spreading: .71 of it


@pytest.mark.parametrize("effect", [0.0, 0.02])
def test_a_paired_difference_sees_through_what_both_share(effect: float):
    rng = np.random.default_rng(3)
    found = []
    for _ in range(STUDIES):
        shared = scores(rng)
        first = shared + effect + rng.normal(0, 0.02, len(shared))
        second = shared + rng.normal(0, 0.02, len(shared))
        found.append(paired_difference(first, second, FAMILIES, rng))
    coverage = np.mean([one.low <= effect <= one.high for one in found])
    assert abs(coverage - LEVEL) < slack(LEVEL)
    claimed = np.mean([one.above_zero for one in found])
    assert claimed > 0.95 if effect else claimed < (1 - LEVEL) / 2 + slack((1 - LEVEL) / 2)


def test_the_probability_of_improvement_covers_the_truth():
    rng = np.random.default_rng(4)
    truth = stats.norm.cdf(0.5 / np.sqrt(2))
    strata = ["a", "b"] * 30
    found = [
        probability_of_improvement(rng.normal(0.5, 1, 60), rng.normal(size=60), strata, rng) for _ in range(STUDIES)
    ]
    assert np.mean([one.estimate for one in found]) == pytest.approx(truth, abs=0.01)
    coverage = np.mean([one.low <= truth <= one.high for one in found])
    assert abs(coverage - LEVEL) < slack(LEVEL) + 0.01  # a share of 60 moves in steps


def test_ties_count_half_and_a_clean_sweep_keeps_its_doubt():
    rng = np.random.default_rng(5)
    strata = ["a"] * 4
    first = np.array([1.0, 1.0, 0.0, 0.0])
    assert probability_of_improvement(first, np.array([0.0, 1.0, 1.0, 0.0]), strata, rng).estimate == 0.5
    sweep = probability_of_improvement(first + 2, first, strata, rng)
    assert (sweep.estimate, sweep.high) == (1, 1)
    assert sweep.low == pytest.approx(stats.binomtest(4, 4).proportion_ci().low)
    rout = probability_of_improvement(first, first + 2, strata, rng)
    assert (rout.estimate, rout.low, rout.high) == (0, 0, pytest.approx(1 - sweep.low))


@given(st.lists(st.booleans(), min_size=3, max_size=30), st.integers(0, 2**31))
def test_a_probability_stays_one(wins: list[bool], seed: int):
    first = np.array(wins, float)
    strata = [str(index % 3) for index in range(len(wins))]
    found = probability_of_improvement(first, np.full(len(wins), 0.5), strata, np.random.default_rng(seed))
    assert 0 <= found.low <= found.estimate <= found.high <= 1


def test_permutation_raises_false_alarms_as_often_as_it_may_and_sees_an_effect():
    rng = np.random.default_rng(6)
    nothing = [paired_permutation_p(rng.normal(size=20), rng.normal(size=20), rng) for _ in range(STUDIES)]
    assert abs(np.mean(np.array(nothing) <= 0.05) - 0.05) < slack(0.05)
    shared = rng.normal(size=20)
    assert paired_permutation_p(shared + 0.5 + rng.normal(0, 0.1, 20), shared, rng) < 0.02


def test_holm_is_the_textbook_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_bounds_the_chance_of_any_false_alarm():
    draws = np.random.default_rng(7).random((STUDIES, 5))
    alarms = np.mean([min(holm(row.tolist())) <= 0.05 for row in draws])
    assert alarms < 0.05 + slack(0.05)
    assert np.mean(draws.min(1) <= 0.05) > 0.15  # what it prevents


def test_the_interquartile_mean_ignores_the_tails():
    values = np.array([-1e6, 0.0, 1.0, 2.0, 3.0, 1e6, 1.5, 1.5])
    assert interquartile_mean(values) == pytest.approx(np.mean([1.0, 1.5, 1.5, 2.0]))
    rng = np.random.default_rng(8)
    found = bootstrap_interval(rng.normal(size=60), ["a"] * 60, rng, interquartile_mean)
    assert found.low < found.estimate < found.high


def test_single_values_are_pooled():
    rng = np.random.default_rng(9)
    values = np.array([0.0, 1.0, 2.0, 3.0])
    alone = bootstrap_interval(values, ["a", "b", "c", "d"], rng)
    assert alone.low < 1 < 2 < alone.high
    one_apart = bootstrap_interval(values, ["a", "a", "a", "d"], rng)
    assert one_apart.low < 1 < 2 < one_apart.high


def test_equal_generators_give_equal_intervals():
    values = scores(np.random.default_rng(10))
    one, two = (bootstrap_interval(values, FAMILIES, np.random.default_rng(1)) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(("values", "strata"), [([1.0], ["a"]), ([1.0, 2.0], ["a"])])
def test_too_little_to_say_anything_is_refused(values: list[float], strata: list[str]):
    with pytest.raises(ValueError, match="at least two"):
        bootstrap_interval(np.array(values), strata, np.random.default_rng(0))
