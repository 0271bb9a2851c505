"""Drawings for pages: whatever the text and the numbers, they are drawn, and text comes back as text."""

import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.lab.drawing import _open_canvas, draw_svg, spread_apart
from esper.lab.exhibit import Row
from esper.lab.grown_figures import grown_exhibits
from esper.lab.policy_figures import LEARNING, health_figure

STAGES = next(figure for figure in grown_exhibits({}) if figure.name == "stages")
HOSTILE = [
    "</text><script>",
    "a\"b'c&d",
    "$x^{\\bad",
    "\x00\x1b[31m",
    "\ud800",
    "a\nb",
    "\u4f60",
    "]]>",
    "<!--",
    "%s{}",
]


class Reader(HTMLParser):
    """Collects tags and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def lane_of(name: str) -> list[Row]:
    """A slot of that name over one decision."""
    return [{"slot_name": name, "decision": 1, "stage": "blending", "blueprint": "norm"}]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_becomes_markup_or_keeps_a_page_from_being_written(name: str) -> None:
    page = draw_svg(replace(STAGES, rows=lane_of(name)))
    found = Reader(page)
    page.encode()
    assert found.tags <= {"svg", "g", "path", "text", "tspan", "defs", "clippath", "rect", "use"}
    letters = "".join(character for character in name if character.isalpha() and character.isprintable())
    assert letters in "".join(character for text in found.texts for character in text if character.isalpha())


@pytest.mark.parametrize(
    "values",
    [
        [float("inf"), 1.0],
        [float("nan"), float("nan")],
        [sys.float_info.max, -sys.float_info.max],
        [sys.float_info.max, 0.0],
        [9e299, -9e299],
        [5e-324, 0.0],
        [0.0, 0.0],
        [None, "a word"],
    ],
    ids=str,
)
def test_numbers_of_any_size_are_drawn(values: list[float]) -> None:
    rows = [
        {"kind": "probe", "name": "greedy policy", "iteration": iteration, "value": value}
        for iteration, value in enumerate(values, 1)
    ]
    page = draw_svg(replace(LEARNING, rows=rows))
    assert ">greedy policy</text>" in page
    assert "nan" not in page


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
    assert spread_apart([10, 90, 50], 15, 0, 100) == [10, 90, 50], "where there is room"


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_curve_of_one_value_is_a_point(iterations: int) -> None:
    rows: dict[str, list[Row]] = {
        "learning": [{"kind": "J", "name": "J", "iteration": i, "value": 0.5 * i} for i in range(iterations)],
        "health": [{"kind": "figure", "name": "ppo/kl", "iteration": i, "value": 0.1 * i} for i in range(iterations)],
    }
    for figure in (LEARNING, health_figure(0.03)):
        with _open_canvas(replace(figure, rows=rows[figure.name])) as canvas:
            curves = [line for axes in canvas.axes for line in axes.lines if len(line.get_xydata()) == iterations]
            curves = [line for line in curves if line.get_linestyle() == "-"]
        assert curves, figure.name
        assert all(line.get_marker() == ("o" if iterations == 1 else "None") for line in curves), figure.name
