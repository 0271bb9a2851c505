"""Labels do not overlap."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from esper.ui.figures.drawing import spread_apart


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(1, 10))
def test_labels_keep_their_order_and_distance_and_stay_inside(places: list[float], gap: float):
    moved = spread_apart(places, gap, 0, 100)
    ordered = sorted(moved)
    assert all(second - first >= gap - 1e-6 for first, second in pairwise(ordered))
    assert ordered[0] >= -1e-6
    assert ordered[-1] <= 100 + 1e-6
    for one, one_moved in zip(places, moved, strict=True):
        for other, other_moved in zip(places, moved, strict=True):
            assert one >= other or one_moved < other_moved


def test_labels_that_have_room_stay_where_they_are():
    assert spread_apart([10, 90, 50], 15, 0, 100) == [10, 90, 50]
