"""Axes hold what they must, with few round ticks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.ui.report.axes import ROUND_FACTORS, axis_for, counting_axis

NUMBERS = st.floats(-1e6, 1e6).map(lambda value: round(value, 4))


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.integers(3, 8))
def test_ticks_are_few_and_round_and_hold_all_values(values: list[float], most: int):
    axis = axis_for(values, most)
    assert 2 <= len(axis.ticks) <= most
    slack = (axis.high - axis.low) * 1e-6
    assert axis.low <= min(values) + slack
    assert axis.high >= max(values) - slack
    step = axis.ticks[1] - axis.ticks[0]
    assert all(abs(second - first - step) <= step * 1e-3 for first, second in pairwise(axis.ticks))
    factor = step / 10 ** math.floor(math.log10(step * 1.0001))
    assert min(abs(factor - known) for known in ROUND_FACTORS) < 0.01


@pytest.mark.parametrize("values", [[], [math.nan], [0.5], [0.0, 0.0], [math.inf, 0.2]])
def test_degenerate_values_still_get_an_axis(values: list[float]):
    axis = axis_for(values)
    assert axis.low < axis.high
    assert all(math.isfinite(tick) for tick in axis.ticks)


def test_labels_have_as_many_decimals_as_they_need():
    axis = axis_for([0.42, 0.61])
    assert [axis.label(tick) for tick in axis.ticks] == ["0.40", "0.45", "0.50", "0.55", "0.60", "0.65"]
    assert axis_for([0, 100]).label(40) == "40"
    assert axis_for([-1, 1]).label(-1) == "\u22121.0"


@pytest.mark.parametrize("size", [1e-30, 3e-11, 1e-7, 2e-4, 1, 7e5, 2.5e7, 1e15, 1e30])
@pytest.mark.parametrize("values", [(0.0, 1.0), (1.0, 1.07), (-1.0, 2.5)])
def test_values_of_any_size_have_ticks_that_are_told_apart(size: float, values: tuple[float, float]):
    axis = axis_for([size * value for value in values])
    labels = [axis.label(tick) for tick in axis.ticks]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) <= 8
    step = axis.ticks[1] - axis.ticks[0]
    written = [float(label.replace("\u2212", "-")) for label in labels]
    assert written == pytest.approx(axis.ticks, abs=step / 100, rel=0)


@pytest.mark.parametrize("last", [1, 2, 3, 7, 30, 56, 100, 101])
def test_counting_axes_end_at_the_last_number(last: int):
    axis = counting_axis(last)
    assert (axis.low, axis.high) == (0, last)
    assert all(tick == int(tick) for tick in axis.ticks)
    assert list(axis.ticks) == sorted(set(axis.ticks))
