"""A comparison claims a difference where one was planted, and none where none was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper.experiments.comparison import Comparison, Standing, Verdict, compare
from experiments.results_cases import FAMILIES, planted

MEANS = {"policy": 0.65, "none": 0.5, "better": 0.7, "equal": 0.65}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(planted(MEANS))


def named(comparison: Comparison, name: str) -> Standing:
    return next(one for one in comparison.standings if one.controller == name)


def test_verdicts_follow_the_planted_differences(comparison: Comparison):
    verdicts = {one.controller: one.against.verdict for one in comparison.others if one.against}
    assert verdicts == {"none": Verdict.ABOVE, "better": Verdict.BELOW, "equal": Verdict.OPEN}


def test_differences_are_the_policys_minus_the_others(comparison: Comparison):
    against = named(comparison, "none").against
    assert against is not None
    assert against.difference.estimate == pytest.approx(0.15, abs=0.01)
    assert against.improvement.estimate == 1


def test_pairing_sees_through_what_instances_share(comparison: Comparison):
    against, alone = named(comparison, "none").against, named(comparison, "none").score
    assert against is not None
    assert against.difference.high - against.difference.low < (alone.high - alone.low) / 3


def test_the_best_comes_first_and_the_policy_is_found(comparison: Comparison):
    assert comparison.standings[0].controller == "better"
    assert comparison.policy.controller == "policy"
    assert comparison.policy.against is None
    assert comparison.instances == 60


def test_growth_is_relative_to_the_host(comparison: Comparison):
    assert named(comparison, "none").growth.estimate == 0
    assert comparison.policy.growth.estimate == pytest.approx((100 + 59 / 2) / 400)


def test_means_by_family(comparison: Comparison):
    results = planted(MEANS)
    assert list(comparison.family_scores) == sorted(FAMILIES)
    own = [one.score for one in results if one.controller == "policy" and one.family == "order"]
    assert comparison.family_scores["order"]["policy"] == pytest.approx(sum(own) / len(own))


def test_more_rivals_make_a_claim_harder():
    few = compare(planted({"policy": 0.5, "none": 0.492}))
    rivals = {f"rival{index}": 0.5 for index in range(8)}
    many = compare(planted({"policy": 0.5, "none": 0.492, **rivals}))
    few_p, many_p = (named(found, "none").against.p for found in (few, many))  # type: ignore[union-attr]
    assert few_p < many_p


def test_a_small_effect_in_one_of_many_questions_is_no_claim():
    means = {"policy": 0.5} | {f"rival{index}": 0.5 for index in range(10)}
    found = compare(planted(means, noise=0.05))
    assert all(one.against and one.against.verdict == Verdict.OPEN for one in found.others)


def test_equal_results_are_no_claim():
    found = compare(planted({"policy": 0.5, "none": 0.5}, noise=0))
    against = found.others[0].against
    assert against is not None
    assert (against.difference.low, against.difference.high, against.improvement.estimate) == (0, 0, 0.5)
    assert against.verdict == Verdict.OPEN


def test_the_same_results_give_the_same_comparison(comparison: Comparison):
    assert compare(planted(MEANS)) == comparison


def test_results_that_cannot_be_paired_are_refused():
    results = planted(MEANS)
    with pytest.raises(ValueError, match="no results of 'policy'"):
        compare([one for one in results if one.controller != "policy"])
    with pytest.raises(ValueError, match="equal did not play the same instances"):
        compare([*results[:-1], replace(results[-1], instance="bott/only/999")])
