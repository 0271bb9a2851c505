"""The answer claims no more than the figures do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from rich.console import Console

from esper.experiments.comparison import Comparison, compare_evaluated
from esper.ui.standings import Answer, did_it_help, standings_table
from experiments.results_cases import planted


def compared(means: Mapping[str, float], noise: float = 0.02) -> Comparison:
    return compare_evaluated(planted(means, noise=noise))


def answered(means: Mapping[str, float], noise: float = 0.02) -> Answer:
    return did_it_help(compared(means, noise))


def test_above_all_is_yes_and_names_the_closest():
    found = answered({"policy": 0.7, "none": 0.5, "heuristic": 0.6})
    assert found.short == "Yes"
    assert "On 60 held-out instances this policy scores 0." in found.sentence
    assert "above every other controller; the closest is heuristic (difference +0." in found.sentence


def test_no_win_is_claimed_where_an_interval_holds_zero():
    found = answered({"policy": 0.7, "none": 0.5, "heuristic": 0.7})
    assert found.short == "In part"
    assert "above none; no difference shown to heuristic (difference " in found.sentence


def test_nothing_told_apart_is_not_shown():
    assert answered({"policy": 0.5, "none": 0.5, "heuristic": 0.5}).short == "Not shown"


def test_below_is_said():
    assert answered({"policy": 0.5, "heuristic": 0.6}).short == "No"
    found = answered({"policy": 0.6, "none": 0.5, "heuristic": 0.7})
    assert found.short == "In part"
    assert "above none; below heuristic (difference \u22120." in found.sentence


def test_a_policy_that_never_grows_is_told():
    results = planted({"policy": 0.5, "none": 0.5}, noise=0)
    idle = [type(one)(**{**vars(one), "added_parameters": 0}) for one in results]
    found = did_it_help(compare_evaluated(idle))
    assert found.short == "Not shown"
    assert found.sentence.endswith("It keeps no seed at all.")


def test_many_that_are_not_told_apart_are_named_only():
    found = answered({"policy": 0.5, "a": 0.5, "b": 0.5, "c": 0.5})
    assert "(difference" not in found.sentence
    assert "no difference shown to " in found.sentence


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_holds_all_figures(width: int):
    comparison = compared({"policy": 0.7, "all_at_start": 0.5, "heuristic": 0.7})
    console = Console(record=True, width=width)
    console.print(standings_table(comparison, "60 held-out instances"))
    text = console.export_text()
    assert "…" not in text
    for one in comparison.standings:
        assert one.name in text
        assert f"{one.score.estimate:.3f}" in text
        assert f"{one.score.low:.3f}\u2013{one.score.high:.3f}" in text
    _, against = comparison.others[-1]
    assert f"{against.difference.estimate:+.3f}" in text
    assert "100%" in text  # better on every instance
