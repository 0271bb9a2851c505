"""The page of arms stands alone and shows every arm in figures and in both plots."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from esper.ui.report.arms import arms_html, write_arms_report
from ui.arms_cases import ARMS, STANDINGS

PAGE = arms_html(ARMS)


def test_every_arm_is_in_both_plots_with_its_intervals() -> None:
    assert PAGE.count("Accuracy against added parameters") == PAGE.count("Accuracy against training FLOPs") == 1
    assert PAGE.count("<circle") == 2 * len(STANDINGS)
    assert PAGE.count('class="whisker') == 2 * 2 * len(STANDINGS)
    assert "none: accuracy 55%, parameters +50%" in PAGE
    assert "none: accuracy 55%, 90 MFLOP" in PAGE


def test_the_figures_say_what_the_standings_say() -> None:
    assert "5 training seeds" in PAGE
    assert "256 held-out instances" in PAGE
    assert '<b class="below">sequence better</b>' in PAGE
    assert '<b class="above">policy better</b>' in PAGE
    assert "230,400" in PAGE
    assert "the policy&#x27;s own actions" not in PAGE, "only the arms that took part are explained"


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    write_arms_report(tmp_path / "arms.html", ARMS)
    text = (tmp_path / "arms.html").read_text()
    assert text == PAGE
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)


@pytest.mark.parametrize("name", ["<script>", "a & b"])
def test_no_name_becomes_markup(name: str) -> None:
    renamed = [one if one.against is None else type(one)(**{**vars(one), "name": name}) for one in STANDINGS]
    page = arms_html(replace(ARMS, standings=renamed))
    assert "<script" not in page
    assert "a & b" not in page
