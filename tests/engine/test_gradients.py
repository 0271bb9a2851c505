"""Health of seeds' gradients: what vanishes and explodes, beside what already counts."""

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.engine.gradients import (
    GradientHealthSettings,
    HealthTable,
    assess_health,
    update_gradient_health,
)
from esper.lifecycle.table import SeedMeasurements
from population.gradient_reference import SeedHealth, health_at

INF, NAN = float("inf"), float("nan")
DEFAULT = GradientHealthSettings()
VANISHED, EXPLODED = DEFAULT.vanished_ratio, DEFAULT.exploded_ratio


def of(seed: Sequence[float], incumbents: Sequence[float], parameters: tuple[int, int] = (4, 100)) -> SeedHealth:
    """The health of one seed whose gradient and that of its incumbents had these norms."""
    own, others = parameters
    table = assess_health(
        np.array(incumbents, float)[:, None],
        np.array(seed, float)[:, None, None],
        host_parameters=np.array([others]),
        seed_parameters=np.array([[own]]),
        fossils=np.zeros((1, 1), np.bool_),
        learning=np.ones((1, 1), np.bool_),
        settings=DEFAULT,
    )
    return health_at(table, 0, 0)


def test_the_ratio_is_per_parameter() -> None:
    assert of([2.0], [10.0], (4, 100)).ratio == pytest.approx(1.0)
    assert of([2.0], [10.0], (1, 100)).ratio == pytest.approx(2.0)


def test_figures_are_means_over_minibatches() -> None:
    assert of([1.0, 3.0], [1.0, 1.0], (1, 1)) == SeedHealth(2, 2.0, 0.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("seed", "incumbents", "vanished", "exploded"),
    [
        (VANISHED * 0.9, 1.0, 1, 0),
        (VANISHED * 1.1, 1.0, 0, 0),
        (EXPLODED * 0.9, 1.0, 0, 0),
        (EXPLODED * 1.1, 1.0, 0, 1),
        (0.0, 1.0, 1, 0),
        (INF, 1.0, 0, 1),
        (NAN, 1.0, 0, 1),
        # Without a scale only the extremes are known.
        (1.0, 0.0, 0, 0),
        (1.0, NAN, 0, 0),
        (1.0, INF, 0, 0),
        (0.0, 0.0, 1, 0),
        (NAN, NAN, 0, 1),
    ],
)
def test_when_a_gradient_vanishes_and_explodes(seed: float, incumbents: float, vanished: int, exploded: int) -> None:
    found = of([seed, 1.0, 1.0, 1.0], [incumbents, 1.0, 1.0, 1.0], (1, 1))
    assert (found.vanished, found.exploded) == (vanished / 4, exploded / 4)


def test_the_ratio_is_of_minibatches_that_can_be_compared() -> None:
    assert of([2.0, INF, NAN, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0, NAN], (1, 1)).ratio == 2.0
    assert np.isnan(of([INF, 1.0], [1.0, 0.0], (1, 1)).ratio)


NORM = st.just(0.0) | st.floats(1e-9, 1e9)


@given(st.lists(st.tuples(NORM, NORM), min_size=1, max_size=5), st.integers(-20, 20))
def test_a_factor_of_the_loss_changes_only_the_norm(norms: list[tuple[float, float]], power: int) -> None:
    seed, incumbents = zip(*norms, strict=True)
    factor = 2.0**power
    found = of(seed, incumbents)
    scaled = of([factor * one for one in seed], [factor * one for one in incumbents])
    assert scaled.norm == factor * found.norm
    np.testing.assert_array_equal(astuple(scaled)[2:], astuple(found)[2:])


def test_incumbents_are_the_host_and_its_fossils() -> None:
    """Network 0 has a fossil in slot 0, network 1 has none; slot 1 learns in both, and slot 2 is empty."""
    hosts, seeds = np.array([[3.0, 3.0]]), np.array([[[4.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    learning = np.array([[True, True, False], [False, True, False]])
    found = assess_health(
        hosts,
        seeds,
        host_parameters=np.array([9, 9]),
        seed_parameters=np.array([[16, 4, 0], [0, 4, 0]]),
        fossils=np.array([[True, False, False], [False, False, False]]),
        learning=learning,
        settings=DEFAULT,
    )
    assert health_at(found, 0, 1) == SeedHealth(1, 1.0, 0.0, 0.0, pytest.approx(0.5))  # .5 beside 5 / sqrt(25)
    assert health_at(found, 0, 0) == SeedHealth(1, 4.0, 0.0, 0.0, pytest.approx(1.0))
    assert health_at(found, 1, 1) == SeedHealth(1, 1.0, 0.0, 0.0, pytest.approx(0.5))  # .5 beside 3 / sqrt(9)
    nothing = HealthTable.none(2, 3)
    for name, array in vars(found).items():
        np.testing.assert_array_equal(array[~learning], vars(nothing)[name][~learning])


# The means over decisions, and the verdict on them.

SHARE = st.integers(0, 8).map(lambda minibatches: minibatches / 8)
DECISION = st.none() | st.tuples(SHARE, SHARE).filter(lambda shares: sum(shares) <= 1)
"""Shares of vanished and of exploded minibatches; None where the seed did not learn."""


def health(vanished: float, exploded: float, minibatches: int = 8) -> HealthTable:
    """The health of a single seed."""
    figures = (np.full((1, 1), figure) for figure in (1.0, vanished, exploded, 1.0))
    return HealthTable(np.full((1, 1), minibatches), *figures)


def after(
    decisions: Sequence[tuple[float, float] | None], settings: GradientHealthSettings = DEFAULT
) -> SeedMeasurements:
    """The measurements on a single seed after these decisions."""
    measurements = SeedMeasurements.none(1, 1)
    for shares in decisions:
        table = HealthTable.none(1, 1) if shares is None else health(*shares)
        measurements = update_gradient_health(measurements, table, settings)
    return measurements


def average(shares: Sequence[float], decay: float) -> float:
    """The obvious exponential mean: the newest has weight 1, the one before it ``decay``, and so on."""
    weights = [decay**age for age in range(len(shares))][::-1]
    return sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)


@given(st.lists(DECISION, max_size=12), st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.sampled_from([0.0, 0.25, 0.5, 0.9]))
def test_a_seed_is_healthy_if_both_of_its_means_are_within_the_bound(
    decisions: list[tuple[float, float] | None], decay: float, bound: float
) -> None:
    measurements = after(decisions, GradientHealthSettings(decay=decay, max_share=bound))
    learned = [shares for shares in decisions if shares is not None]
    if not learned:
        assert not measurements.gradient_healthy[0, 0], "it was never measured"
        assert measurements.gradient_weight[0, 0] == 0
        return
    vanished, exploded = (average(shares, decay) for shares in zip(*learned, strict=True))
    assert measurements.vanished_share[0, 0] == pytest.approx(vanished, abs=1e-12)
    assert measurements.exploded_share[0, 0] == pytest.approx(exploded, abs=1e-12)
    if min(abs(vanished - bound), abs(exploded - bound)) > 1e-9:
        assert measurements.gradient_healthy[0, 0] == (max(vanished, exploded) <= bound)


def test_the_bound_itself_is_healthy() -> None:
    settings = GradientHealthSettings(max_share=0.25)
    assert after([(0.25, 0.25)], settings).gradient_healthy.all()
    assert not after([(0.375, 0.0)], settings).gradient_healthy.any()
    assert not after([(0.0, 0.375)], settings).gradient_healthy.any()


def test_a_seed_recovers_and_falls_ill_at_the_pace_of_the_decay() -> None:
    ill, well = (1.0, 0.0), (0.0, 0.0)
    for decay, decisions in ((0.0, 1), (0.6, 2), (0.9, 7)):
        settings = GradientHealthSettings(decay=decay)
        assert not after([ill] * 50 + [well] * (decisions - 1), settings).gradient_healthy.any()
        assert after([ill] * 50 + [well] * decisions, settings).gradient_healthy.all()


def test_seeds_have_means_of_their_own() -> None:
    """Of three networks with two slots, only those that learned change."""
    minibatches = np.array([[8, 0], [0, 8], [0, 0]])
    shares = np.where(minibatches > 0, 1.0, 0.0)
    ill = HealthTable(minibatches, shares, shares, np.zeros((3, 2)), shares)
    before = update_gradient_health(SeedMeasurements.none(3, 2), replace(ill, minibatches=np.full((3, 2), 8)), DEFAULT)
    before = replace(before, vanished_share=np.zeros((3, 2)))
    found = update_gradient_health(before, ill, DEFAULT)
    np.testing.assert_array_equal(found.vanished_share, shares / 1.5)
    np.testing.assert_array_equal(found.gradient_weight, np.where(minibatches > 0, 1.5, 1.0))
    np.testing.assert_array_equal(found.gradient_healthy, minibatches == 0)


def test_ratios_between_which_nothing_lies_are_refused() -> None:
    with pytest.raises(ValueError, match="no gradient is healthy.*lower vanished_ratio or raise exploded_ratio"):
        GradientHealthSettings(vanished_ratio=1.0, exploded_ratio=1.0)
