"""Arms in words that claim no more than the figures do, in a table that fits a terminal, and as records."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from esper.control.learned import SAMPLED, UNTRAINED
from esper.control.rules import SHUFFLED
from esper.dash.formats import MINUS, signed_score
from esper.lab.analysis import Comparison, compare_controllers
from esper.lab.standings import (
    ARM_MEANINGS,
    HEADING_WIDTH,
    Conclusion,
    assess_learning,
    describe_arm,
    format_interval,
    record_comparison,
    standings_columns,
    standings_rows,
    standings_table,
)
from esper.tasks.registry import get_suite
from esper.train.evaluation import create_baselines
from lab.arms_cases import ARMS, STANDINGS
from train.results_cases import planted


def test_headings_name_who_is_compared_with_the_row() -> None:
    titles = {column.name: column.heading for column in standings_columns(ARMS)}
    assert (titles["difference"], titles["probability_of_improvement"]) == ("policy minus\u00a0it", "policy wins")
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        console.print(standings_table(ARMS))
    first, second, *_ = captured.get().splitlines()
    assert first.split() == ["policy"]
    assert second.replace("\u00a0", " ").split()[-3:] == ["minus", "it", "p"]


def test_sentences_rows_and_records_say_who_is_better_by_how_much_and_what_it_took() -> None:
    words = [describe_arm(ARMS, one) for one in STANDINGS]
    assert words[0] == "policy: found with 230,400 environment steps"
    assert words[1] == (
        "none: policy better, policy minus none +0.200 (+0.190 to +0.210), p <0.001, "
        "policy better in 96% of pairs; found with 230,400 environment steps"
    )
    assert words[3].startswith(f"sequence: sequence better, policy minus sequence {MINUS}0.050")
    assert [format_interval((-0.01, 0.05), *write) for write in ((), (signed_score,))] == [
        "\u22120.010 to 0.050",
        "\u22120.010 to +0.050",
    ]
    assert [row["kind"] for row in standings_rows(ARMS)] == ["policy", "above", "other", "below"]
    records = json.loads(json.dumps(asdict(record_comparison(ARMS))))["standings"]
    assert records[0]["difference"] is records[0]["verdict"] is None
    assert (records[1]["difference"], records[1]["difference_interval"]) == (0.2, pytest.approx([0.19, 0.21]))
    assert records[3]["verdict"] == "sequence better"


def test_every_arm_of_the_standings_is_explained() -> None:
    baselines = {rule.name for rule in create_baselines(get_suite("tokens"))}
    assert {*baselines, *(one.name for one in STANDINGS), UNTRAINED, SAMPLED, SHUFFLED} <= set(ARM_MEANINGS)


@pytest.mark.parametrize("name", ["policy", "my_long_controller"])
def test_no_heading_is_wider_than_the_figures_below_it(name: str) -> None:
    reference, *others = (replace(one, flops=None, flops_interval=None) for one in STANDINGS)
    table = standings_table(replace(ARMS, standings=[replace(reference, name=name), *others]))
    headings = [str(column.header).split("\n") for column in table.columns]
    assert max(len(line) for lines in headings for line in lines) <= HEADING_WIDTH
    assert [lines[-1] for lines in headings[-3:]] == ["minus\u00a0it", "wins", "p"]


def compared(means: Mapping[str, float], noise: float = 0.02) -> Comparison:
    return compare_controllers([planted(means, noise=noise)])


def answered(means: Mapping[str, float], noise: float = 0.02) -> Conclusion:
    return assess_learning(compared(means, noise))


SELVES = {"untrained": 0.6, "shuffled": 0.6}
AS_GOOD, BETTER = (f"It learned, but heuristic is {level}: use that" for level in ("as good", "better"))


SELVES = {"untrained": 0.6, "shuffled": 0.6}
AS_GOOD, BETTER = (f"It learned, but heuristic is {level}: use that" for level in ("as good", "better"))


@pytest.mark.parametrize(
    ("means", "short", "words"),
    [
        (
            {"policy": 0.7, **SELVES, "none": 0.5, "heuristic": 0.65},
            "Yes",
            (
                "On 60 held-out instances this policy scores 0.",
                "above its untrained self (difference +0.",
                "above the best other controller, heuristic (difference +0.",
            ),
        ),
        (
            {"policy": 0.7, **SELVES, "none": 0.5, "heuristic": 0.7},
            AS_GOOD,
            ("above its untrained self (", "not shown to differ from the best other controller, heuristic ("),
        ),
        (
            {"policy": 0.65, **SELVES, "none": 0.65, "heuristic": 0.7},
            BETTER,
            ("below the best other controller, heuristic (difference \u22120.", "not shown to differ from none"),
        ),
        # The untrained self is as good or better: whatever the policy is above, it does not come from learning.
        ({"policy": 0.7, **SELVES, "untrained": 0.7, "heuristic": 0.6}, "No", ("not shown to differ from its untr",)),
        ({"policy": 0.6, **SELVES, "untrained": 0.7, "heuristic": 0.5}, "No", ("below its untrained self (",)),
        ({"policy": 0.6, **SELVES, "heuristic": 0.6}, "No", ()),
        # Ways to play the policy itself are not other controllers.
        ({"policy": 0.7, **SELVES, "shuffled": 0.7, "none": 0.5}, "Yes", ("not shown to differ from shuffled",)),
        ({"policy": 0.7, **SELVES, "sampled": 0.75, "none": 0.5}, "Yes", ("better by drawing its choices: greedy pl",)),
        ({"policy": 0.7, **SELVES, "sampled": 0.65, "none": 0.5}, "Yes", ("It plays better greedily: greedy play is",)),
        ({"policy": 0.7, "none": 0.5}, "Not known, since its untrained self did not play", ("above the best other",)),
    ],
)
def test_the_answer_claims_what_is_shown(means: dict[str, float], short: str, words: tuple[str, ...]) -> None:
    found = answered(means)
    assert found.short == short
    assert all(one in found.sentence for one in words), found.sentence
    assert ("It plays better" in found.sentence) == ("sampled" in means)


def test_a_policy_that_never_grows_is_told() -> None:
    results = planted({"policy": 0.5, "untrained": 0.5, "none": 0.5}, noise=0)
    found = assess_learning(compare_controllers([[replace(one, added_parameters=0) for one in results]]))
    assert found.short == "No"
    assert found.sentence.endswith("It keeps no seed at all.")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_holds_all_figures(width: int):
    comparison = compared({"policy": 0.7, "all_at_start": 0.5, "heuristic": 0.7})
    console = Console(record=True, width=width)
    console.print(standings_table(comparison, "60 held-out instances"))
    text = console.export_text()
    assert "…" not in text
    for one in comparison.standings:
        assert one.name in text
        assert f"{one.score:.3f}" in text
        low, high = one.score_interval
        assert f"{low:.3f}\u2013{high:.3f}" in text
    assert f"{comparison.others[-1].difference:+.3f}" in text
    assert "100%" in text  # better on every instance
