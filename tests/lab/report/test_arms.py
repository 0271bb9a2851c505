"""The page of a comparison stands alone and shows every arm in figures and in both plots."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from esper.lab.analysis import Verdict
from esper.lab.comparison import Comparison
from esper.lab.report.training import report_configurations
from lab.arms_cases import ARMS, STANDINGS


def render(arms: Comparison) -> str:
    return report_configurations(Path("runs"), replace(ARMS, standings=STANDINGS[:1], verdicts={}), arms).render()


PAGE = render(ARMS)


def test_every_arm_is_in_both_plots_and_explained() -> None:
    (drawn,) = re.findall(r'<figure id="figure-arms_costs".*?</svg>', PAGE, re.DOTALL)
    assert all(f">{one.name}</text>" in drawn for one in STANDINGS)
    assert all(f">{words}</text>" in drawn for words in ("parameters added / host's", "training MFLOP"))
    assert PAGE.count("the best fixed sequence found with") == 1


def test_the_figures_say_what_the_standings_say() -> None:
    assert "5 training seeds" in PAGE
    assert "256 held-out instances" in PAGE
    assert '<b class="below">sequence better</b>' in PAGE
    assert '<b class="above">policy better</b>' in PAGE
    assert "230,400" in PAGE
    assert "the policy&#39;s own actions" not in PAGE, "only the arms that took part are explained"


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert render(ARMS) == PAGE
    assert "default-src 'none'" in PAGE
    assert not re.search(r"src=|href=\"(?!#)|url\((?!#)|@import", PAGE)


@pytest.mark.parametrize("name", ["<script>", "a & b"])
def test_no_name_becomes_markup(name: str) -> None:
    renamed = [STANDINGS[0], replace(STANDINGS[1], name=name)]
    page = render(replace(ARMS, standings=renamed, verdicts={name: Verdict.ABOVE}, family_scores={}))
    assert "<script" not in page
    assert "a & b" not in page
