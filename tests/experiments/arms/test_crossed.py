"""The test is calibrated for few seeds, whatever varies, and finds effects that are there."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from esper.experiments.arms.crossed import crossed_interval, crossed_test
from esper.experiments.statistics import Floats, holm

INSTANCES = 42
FAMILY = np.arange(INSTANCES) % 7
FAMILIES = [f"family {number}" for number in FAMILY]
SIMULATIONS = 1000
MOST_ALARMS = 0.05 * SIMULATIONS + 3 * (0.05 * 0.95 * SIMULATIONS) ** 0.5
"""Three standard deviations above what the level allows."""


def drawn(
    rng: np.random.Generator, seeds: int, *, luck: float = 0.02, taste: float = 0.0, effect: float = 0.0
) -> Floats:
    """Paired differences: luck by seed, by family of a seed, and (taste) by instance for all seeds; noise on each."""
    by_seed = rng.normal(0, luck, (seeds, 1)) + rng.normal(0, luck, (seeds, 7))[:, FAMILY]
    return effect + by_seed + rng.normal(0, taste, INSTANCES) + rng.normal(0, 0.08, (seeds, INSTANCES))


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("taste", [0.0, 0.05])
def test_false_alarms_are_no_more_than_stated(seeds: int, taste: float) -> None:
    rng = np.random.default_rng(seeds)
    alarms = sum(crossed_test(drawn(rng, seeds, taste=taste), FAMILIES).p <= 0.05 for _ in range(SIMULATIONS))
    assert alarms <= MOST_ALARMS
    if taste == 0:
        assert alarms >= 0.02 * SIMULATIONS, "and no test that never says anything"


def test_many_arms_do_not_raise_more_false_alarms() -> None:
    rng = np.random.default_rng(0)
    alarmed = [min(holm([crossed_test(drawn(rng, 5), FAMILIES).p for _ in range(11)])) <= 0.05 for _ in range(150)]
    assert np.mean(alarmed) <= 0.05 + 3 * (0.05 * 0.95 / 150) ** 0.5


def test_without_seeds_as_units_luck_would_pass_for_skill() -> None:
    """The same differences, tested as if every pair of seed and instance were independent."""
    rng = np.random.default_rng(1)
    naive = [stats.ttest_1samp(drawn(rng, 5).ravel(), 0).pvalue <= 0.05 for _ in range(200)]
    assert np.mean(naive) > 0.2


def test_without_instances_at_random_a_lucky_draw_would_pass_for_skill() -> None:
    rng = np.random.default_rng(2)
    blind = [stats.ttest_1samp(drawn(rng, 5, taste=0.1, luck=0.0).mean(1), 0).pvalue <= 0.05 for _ in range(200)]
    assert np.mean(blind) > 0.2


def test_a_known_effect_is_found() -> None:
    rng = np.random.default_rng(3)
    found = [crossed_test(drawn(rng, 5, effect=0.06), FAMILIES) for _ in range(100)]
    assert np.mean([one.p <= 0.05 for one in found]) >= 0.8
    assert all(one.interval.estimate > 0 for one in found)


def test_the_intervals_cover_the_truth() -> None:
    rng = np.random.default_rng(4)
    tested = covered = 0
    for _ in range(200):
        values = drawn(rng, 5, taste=0.05, effect=0.1)
        interval, careful = crossed_interval(values, FAMILIES), crossed_test(values, FAMILIES).interval
        covered += interval.low <= 0.1 <= interval.high
        tested += careful.low <= 0.1 <= careful.high
    assert covered >= 178
    assert tested >= 186


def test_where_instances_add_nothing_it_is_the_t_test_of_seeds() -> None:
    means = np.array([0.01, 0.03, -0.02, 0.05, 0.02])
    values = means[:, None] + np.tile([0.1, -0.1], (5, 21)) * np.array([1, -1, 1, -1, 0])[:, None]
    found = crossed_test(values, ["a"] * INSTANCES)
    expected = stats.ttest_1samp(means, 0)
    assert found.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high))


def test_what_does_not_depend_on_seeds_has_the_interval_of_its_instances() -> None:
    values = np.random.default_rng(5).normal(0.5, 0.1, (1, 30))
    expected = stats.ttest_1samp(values[0], 0).confidence_interval(0.95)
    for repeated in (values, np.tile(values, (5, 1))):
        found = crossed_interval(repeated, ["a"] * 30)
        assert (found.low, found.high) == pytest.approx(tuple(expected))


def test_equal_arms_are_equal() -> None:
    found = crossed_test(np.zeros((5, INSTANCES)), FAMILIES)
    assert (found.p, found.interval.low, found.interval.high) == (1, 0, 0)


def test_families_of_one_instance_are_told_apart_as_one_family() -> None:
    values = np.random.default_rng(6).normal(0, 1, (3, 4))
    assert crossed_interval(values, list("abcd")) == crossed_interval(values, list("aaaa"))


@pytest.mark.parametrize(("shape", "families"), [((3, 1), ["a"]), ((3, 4), ["a"])])
def test_what_has_no_interval_is_refused(shape: tuple[int, int], families: list[str]) -> None:
    with pytest.raises(ValueError, match="give at least two, and a family each"):
        crossed_interval(np.zeros(shape), families)
