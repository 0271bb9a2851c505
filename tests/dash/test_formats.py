"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from esper.dash import formats


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0:00"), (59.6, "1:00"), (187, "3:07"), (3787, "1:03:07"), (math.inf, "?"), (math.nan, "?")],
)
def test_durations(seconds: float, words: str):
    assert formats.duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.0214, "+0.021"), (-0.0214, "\u22120.021"), (0.0004, "0.000"), (-0.0004, "0.000")]
)
def test_signs_are_never_put_before_nothing(value: float, words: str):
    assert formats.signed_score(value) == words


@pytest.mark.parametrize(("share", "words"), [(0, "0%"), (0.001, "<1%"), (0.005, "<1%"), (0.126, "13%"), (1.3, "130%")])
def test_percents_do_not_hide_what_is_small(share: float, words: str):
    assert formats.percent(share) == words


@pytest.mark.parametrize(("p", "words"), [(0.0004, "<0.001"), (0.034, "0.034"), (1.0, "1.000")])
def test_p_values_are_never_zero(p: float, words: str):
    assert formats.p_value(p) == words


@pytest.mark.parametrize(
    ("words", "sentence"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_lists(words: list[str], sentence: str):
    assert formats.join_words(words) == sentence
