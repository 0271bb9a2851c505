"""Health of seeds' gradients: what vanishes and explodes, beside what already counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.engine.gradients import EXPLODED, VANISHED, GradientNorms, HealthTable, assess_health, compare_gradients
from population.gradient_reference import SeedHealth, health_at

INF, NAN = float("inf"), float("nan")


def of(seed: Sequence[float], incumbents: Sequence[float], parameters: tuple[int, int] = (4, 100)) -> SeedHealth:
    """The health of one seed whose gradient and that of its incumbents had these norms."""
    own, others = parameters
    table = compare_gradients(
        GradientNorms(np.array(seed, float)[:, None], np.array([own])),
        GradientNorms(np.array(incumbents, float)[:, None], np.array([others])),
    )
    return health_at(table, 0)


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
    )
    assert health_at(found, 0, 1) == SeedHealth(1, 1.0, 0.0, 0.0, pytest.approx(0.5))  # .5 beside 5 / sqrt(25)
    assert health_at(found, 0, 0) == SeedHealth(1, 4.0, 0.0, 0.0, pytest.approx(1.0))
    assert health_at(found, 1, 1) == SeedHealth(1, 1.0, 0.0, 0.0, pytest.approx(0.5))  # .5 beside 3 / sqrt(9)
    nothing = HealthTable.none(2, 3)
    for name, array in vars(found).items():
        np.testing.assert_array_equal(array[~learning], vars(nothing)[name][~learning])
