"""A comparison claims a difference where one was planted, and none where none was."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from esper.lab.analysis import FEWEST_SEEDS, Claim, Comparison, Entry, Verdict, compare, compare_controllers
from esper.train.results import ArmRecord
from train.results_cases import FAMILIES, planted

MEANS = {"policy": 0.65, "none": 0.5, "better": 0.7, "equal": 0.65}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare_controllers([planted(MEANS)])


def named(comparison: Comparison, name: str) -> ArmRecord:
    return next(one for one in comparison.standings if one.name == name)


def test_a_comparison_holds_what_was_planted(comparison: Comparison):
    assert comparison.verdicts == {"none": Verdict.ABOVE, "better": Verdict.BELOW, "equal": Verdict.OPEN}
    assert comparison.standings[0].name == "better", "the best comes first"
    assert (comparison.reference.name, comparison.instances) == ("policy", 60)
    none = named(comparison, "none")
    assert (none.difference, none.probability_of_improvement, none.added) == (pytest.approx(0.15, abs=0.01), 1, 0)
    assert comparison.reference.added == pytest.approx((100 + 59 / 2) / 400), "relative to the host"
    # Pairing takes out what instances share.
    assert none.difference_interval is not None
    assert np.ptp(none.difference_interval) < np.ptp(none.score_interval) / 3
    assert list(comparison.family_scores) == sorted(FAMILIES)
    own = [one.score for one in planted(MEANS) if one.controller == "policy" and one.family == "order"]
    assert comparison.family_scores["order"]["policy"] == pytest.approx(sum(own) / len(own))
    (other,) = compare_controllers([planted({"policy": 0.5, "none": 0.5}, noise=0)]).others
    assert (other.difference, other.p, other.probability_of_improvement) == (0, 1, 0.5), "equal results are no claim"


def test_results_that_cannot_be_paired_are_refused():
    results = planted(MEANS)
    with pytest.raises(ValueError, match="no results of 'policy'"):
        compare_controllers([[one for one in results if one.controller != "policy"]])
    with pytest.raises(ValueError, match="equal did not play the same instances"):
        compare_controllers([[*results[:-1], replace(results[-1], instance="bott/only/999")]])


def seeds(mean: float, count: int, stream: int) -> Entry:
    """One of those compared, whose seeds differ a little."""
    luck = np.random.default_rng(stream).normal(0, 0.01, count)
    return Entry(f"mean {mean}", [planted({"policy": mean + one}, noise=0.03, stream=stream) for one in luck])


@pytest.mark.parametrize("paired", [True, False])
def test_several_seeds_speak_of_the_way_of_training_once_they_are_enough(paired: bool):
    for count in (FEWEST_SEEDS - 1, FEWEST_SEEDS):
        found = compare([seeds(0.6, count, 1), seeds(0.5, count, 2)], Claim.TRAINING, paired=paired)
        (other,) = found.others
        enough = count >= FEWEST_SEEDS
        assert found.verdicts == {other.name: Verdict.ABOVE if enough else Verdict.TOO_FEW}
        assert (other.p is None, other.difference_interval is None) == (not enough, not enough)
        assert (found.seeds, found.instances) == (count, 60)
        assert len(found.reference.by_seed) == count


def test_an_arm_without_seeds_meets_every_seed_of_the_policy():
    own, fixed = seeds(0.6, 5, 1), Entry("fixed", [planted({"none": 0.5}, noise=0)])
    (other,) = compare([own, fixed], Claim.TRAINING, paired=True).others
    assert other.difference == pytest.approx(np.mean([r.score for s in own.seeds for r in s]) - other.score)


def test_other_instances_are_refused():
    other = Entry("b", [planted({"policy": 0.5}, count=30)] * 5)
    with pytest.raises(ValueError, match="b did not play the same instances"):
        compare([Entry("a", [planted({"policy": 0.5})] * 5), other], Claim.TRAINING, paired=True)


def test_runs_with_instances_of_their_own_are_compared_by_their_means():
    means = [{"policy": 0.6 + luck, "none": 0.5} for luck in (0.0, 0.01, -0.02, 0.015, 0.005)]
    runs = [planted(one, noise=0.02, stream=number) for number, one in enumerate(means)]
    found = compare_controllers(runs, claim=Claim.TRAINING)
    (other,) = found.others
    differences = np.subtract(found.reference.by_seed, other.by_seed)
    expected = stats.ttest_1samp(differences, 0)
    assert other.p == pytest.approx(expected.pvalue)
    assert compare_controllers(runs[:4], claim=Claim.TRAINING).verdicts == {"none": Verdict.TOO_FEW}
