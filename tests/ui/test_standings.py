"""Arms in words, in a table that fits a terminal, and as records for machines."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from esper.ui.formats import EN_DASH, MINUS
from esper.ui.standings import ABOUT, comparison_record, describe_standing, standings_rows, standings_table
from ui.arms_cases import ARMS, STANDINGS


def test_the_table_fits_eighty_columns_uncut() -> None:
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(standings_table(ARMS))
    text = captured.get()
    assert "…" not in text
    assert "static_equal_flops" in text
    assert f"0.690{EN_DASH}0.710" in text
    assert f"+0.190{EN_DASH}+0.210" in text


def test_a_sentence_says_who_is_better_by_how_much_and_what_it_took() -> None:
    words = [describe_standing(ARMS, one) for one in STANDINGS]
    assert words[0] == "policy: found with 230,400 environment steps"
    assert words[1] == (
        "none: policy better, policy less none +0.200 (+0.190 to +0.210), p <0.001, "
        "policy better in 96% of pairs; found with 230,400 environment steps"
    )
    assert words[3].startswith(f"sequence: sequence better, policy less sequence {MINUS}0.050")


def test_verdicts_are_marked_for_and_against_the_policy() -> None:
    assert standings_rows(ARMS).texts("kind") == ["policy", "above", "other", "below"]


def test_records_survive_json_and_the_policy_is_compared_with_nobody() -> None:
    records = json.loads(json.dumps(comparison_record(ARMS)))["standings"]
    assert records[0]["difference"] is records[0]["verdict"] is None
    assert (records[1]["difference"], records[1]["difference_interval"]) == (0.2, pytest.approx([0.19, 0.21]))
    assert records[3]["verdict"] == "sequence better"


def test_every_arm_of_the_standings_is_explained() -> None:
    assert all(one.name in ABOUT for one in STANDINGS)
