"""The page of a comparison stands alone and shows every arm in figures and in both plots."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

from esper.lab.analysis import Comparison, Verdict
from esper.lab.drawing import COLOURS, INK
from esper.lab.report import report_configurations
from esper.lab.standings import ARM_MEANINGS
from esper.runs.reader import SCORE_MEANING
from lab.arms_cases import ARMS, STANDINGS


def render(arms: Comparison) -> str:
    return report_configurations(Path("runs"), replace(ARMS, standings=STANDINGS[:1], verdicts={}), arms).render()


PAGE = render(ARMS)


def test_every_arm_is_in_both_plots_and_explained() -> None:
    (drawn,) = re.findall(r'<figure id="figure-arms_costs".*?</svg>', PAGE, re.DOTALL)
    assert all(f">{one.name}</text>" in drawn for one in STANDINGS)
    assert all(f">{words}</text>" in drawn for words in ("parameters added / host's", "training MFLOP"))
    assert PAGE.count("the best fixed sequence found with") == 1


def test_every_arm_has_a_colour_of_its_own_and_the_same_in_both_plots() -> None:
    many = [replace(STANDINGS[index and 1], name=f"arm{index}") for index in range(len(ARM_MEANINGS) + 1)]
    verdicts = dict.fromkeys([arm.name for arm in many[1:]], Verdict.OPEN)
    page = render(replace(ARMS, standings=many, verdicts=verdicts, family_scores={}))
    for plot in ("scores", "costs"):
        (drawn,) = re.findall(rf'<figure id="figure-arms_{plot}".*?</svg>', page, re.DOTALL)
        shades = [COLOURS[index] if COLOURS[index] != INK else "var(--ink)" for index in range(len(many))]
        assert all(shade in drawn for shade in shades)
    assert len(set(COLOURS)) == len(COLOURS) >= len(many)


def test_score_is_explained_with_the_first_figure() -> None:
    assert SCORE_MEANING in unescape(PAGE[: PAGE.index("</figcaption>")])


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
