"""The one analysis: it raises false alarms as often as it may, finds effects, covers the truth, and knows its limits.

docs/experiments.md states the rates that these simulations give;
`pytest -n 0 -m "slow or not slow" -rP -k rate tests/lab/test_analysis.py` prints them.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy import stats

from esper.errors import RunError
from esper.lab.analysis import (
    LEVEL,
    SIGNIFICANCE,
    Claim,
    Contrast,
    Difference,
    Verdict,
    estimate_differences,
    holm,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
)
from esper.numerics.arrays import Floats

INSTANCES = 42
FAMILY = np.arange(INSTANCES) % 7
FAMILIES = [f"family {number}" for number in FAMILY]
STUDIES = 1500
MOST = SIGNIFICANCE + 3 * (SIGNIFICANCE * LEVEL / STUDIES) ** 0.5
"""Three standard deviations above what the level allows."""
NOISE = 0.08
VARIANCES = {
    "noise alone": (0.0, 0.0),
    "some luck": (0.02, 0.0),
    "luck": (0.1, 0.0),
    "luck and taste": (0.02, 0.05),
    "taste": (0.0, 0.1),
    "taste above all": (0.005, 0.2),
}
"""Standard deviations of luck (of a seed, and of a seed in a family), and of taste (of an instance, for every seed)."""
Study = Callable[[np.random.Generator], Contrast]


def seeds_of(rng: np.random.Generator, seeds: int, luck: float) -> Floats:
    """``[N, M]`` scores about zero: luck by seed and by family of a seed, and noise."""
    by_seed = rng.normal(0, luck, (seeds, 1)) + rng.normal(0, luck, (seeds, 7))[:, FAMILY]
    return by_seed + rng.normal(0, NOISE, (seeds, INSTANCES))


def collapsing(rng: np.random.Generator, seeds: int) -> Floats:
    """One seed in five never learns: -.12 instead of +.03."""
    return np.where(rng.random((seeds, 1)) < 0.2, -0.12, 0.03) + seeds_of(rng, seeds, 0.005)


def paired(seeds: int, luck: float, taste: float, effect: float = 0.0) -> Study:
    """A policy against an arm that follows from it or needs no seeds."""

    def draw(rng: np.random.Generator) -> Contrast:
        second = rng.normal(0, 0.15, (1, INSTANCES))
        first = second + effect + seeds_of(rng, seeds, luck) + rng.normal(0, taste, INSTANCES)
        return Contrast(first, second, paired=True)

    return draw


def independent(seeds: int, luck: float, taste: float, *, ratio: float = 1.0, effect: float = 0.0) -> Study:
    """Two ways of training, the second with ``ratio`` times the luck."""

    def draw(rng: np.random.Generator) -> Contrast:
        ease = rng.normal(0, 0.15, INSTANCES)
        first = effect + seeds_of(rng, seeds, luck) + rng.normal(0, taste, INSTANCES)
        return Contrast(ease + first, ease + seeds_of(rng, seeds, luck * ratio), paired=False)

    return draw


def repeat_study(study: Study, claim: Claim = Claim.TRAINING, studies: int = STUDIES) -> list[Difference]:
    rng = np.random.default_rng(0)
    return [estimate_differences([study(rng)], FAMILIES, claim)[0] for _ in range(studies)]


def rate(study: Study, claim: Claim = Claim.TRAINING) -> float:
    """Of verdicts for or against."""
    found = float(np.mean([one.verdict in (Verdict.ABOVE, Verdict.BELOW) for one in repeat_study(study, claim)]))
    print(f"{found:.1%}")  # noqa: T201
    return found


KINDS: dict[str, Callable[[int, float, float], Study]] = {
    "paired": paired,
    "independent": independent,
    "unequal": partial(independent, ratio=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("varying", VARIANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_rate_of_false_alarms_is_what_the_level_allows(kind: str, varying: str, seeds: int) -> None:
    found = rate(KINDS[kind](seeds, *VARIANCES[varying]))
    assert 0.025 <= found <= MOST, "and the test does claim something"


@pytest.mark.parametrize("varying", ["luck and taste", "taste"])
@pytest.mark.parametrize("kind", KINDS)
def test_neither_luck_nor_taste_passes_for_skill(kind: str, varying: str) -> None:
    """The quick one of the above."""
    found = repeat_study(KINDS[kind](5, *VARIANCES[varying]), studies=300)
    alarms = np.mean([one.verdict is not Verdict.OPEN for one in found])
    assert alarms <= SIGNIFICANCE + 3 * (SIGNIFICANCE * LEVEL / 300) ** 0.5
    intervals = [one.interval for one in found if one.interval is not None]
    assert np.mean([one.low <= 0 <= one.high for one in intervals]) == pytest.approx(1 - alarms)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [5, 10])
def test_rate_with_collapsed_runs_on_both_sides_is_below_the_level(seeds: int) -> None:
    found = rate(lambda rng: Contrast(collapsing(rng, seeds), collapsing(rng, seeds), paired=False))
    assert found <= MOST


@pytest.mark.slow
def test_rate_with_collapsed_runs_on_one_side_is_near_the_level() -> None:
    found = rate(lambda rng: Contrast(collapsing(rng, 5), seeds_of(rng, 5, 0.06), paired=False))
    assert found <= MOST + 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "least", "most"), [(5, 0.25, 0.36), (10, 0.08, 0.15)])
def test_rate_of_what_no_test_can_know_is_as_documented(seeds: int, least: float, most: float) -> None:
    """Against an arm without seeds: where one seed in five collapses, a third of all fives have none that did."""
    found = rate(lambda rng: Contrast(collapsing(rng, seeds), np.zeros((1, INSTANCES)), paired=True))
    assert least <= found <= most


@pytest.mark.slow
def test_rate_for_one_policy_is_what_the_level_allows() -> None:
    found = rate(lambda rng: Contrast(seeds_of(rng, 1, 0.0), np.zeros((1, INSTANCES)), paired=True), Claim.POLICY)
    assert abs(found - SIGNIFICANCE) <= MOST - SIGNIFICANCE


def test_rate_for_a_family_of_questions_is_what_the_level_allows() -> None:
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        own = seeds_of(rng, 5, 0.02)
        arms = [Contrast(own, rng.normal(0, 0.08, (1, INSTANCES)), paired=True) for _ in range(11)]
        alarms += any(one.verdict is not Verdict.OPEN for one in estimate_differences(arms, FAMILIES, Claim.TRAINING))
    print(f"{alarms / 300:.1%}")  # noqa: T201
    assert alarms / 300 <= SIGNIFICANCE + 3 * (SIGNIFICANCE * LEVEL / 300) ** 0.5


@pytest.mark.parametrize(
    ("study", "least"),
    [
        (paired(5, 0.02, 0.0, effect=0.06), 0.95),
        (paired(5, 0.02, 0.05, effect=0.06), 0.9),
        (independent(5, 0.02, 0.0, effect=0.08), 0.95),
        (independent(5, 0.02, 0.0, effect=0.04), 0.45),
        (independent(10, 0.02, 0.0, effect=0.04), 0.85),
    ],
)
def test_rate_of_effects_found_is_as_stated(study: Study, least: float) -> None:
    found = repeat_study(study, studies=400)
    print(f"{np.mean([one.verdict is Verdict.ABOVE for one in found]):.1%}")  # noqa: T201
    assert np.mean([one.verdict is Verdict.ABOVE for one in found]) >= least
    assert np.mean([one.verdict is Verdict.BELOW for one in found]) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("varying", VARIANCES)
def test_rate_of_intervals_that_hold_the_truth_is_the_level(varying: str, seeds: int) -> None:
    luck, taste = VARIANCES[varying]
    studies = (paired(seeds, luck, taste, effect=0.1), independent(seeds, luck, taste, ratio=2, effect=0.1))
    for study in studies:
        intervals = [one.interval for one in repeat_study(study, studies=800)]
        held = np.mean([one.low <= 0.1 <= one.high for one in intervals if one is not None])
        print(f"{held:.1%}")  # noqa: T201
        assert abs(held - LEVEL) <= 3 * (SIGNIFICANCE * LEVEL / 800) ** 0.5 + 0.005


@pytest.mark.parametrize("claim", Claim)
def test_a_verdict_an_interval_and_a_p_never_contradict_each_other(claim: Claim) -> None:
    seeds = 5 if claim is Claim.TRAINING else 1
    effects = np.linspace(-0.1, 0.1, 60)
    rng = np.random.default_rng(1)
    for effect in effects:
        (one,) = estimate_differences([paired(seeds, 0.02, 0.02, effect)(rng)], FAMILIES, claim)
        assert one.p is not None
        clear = one.interval.low > 0 or one.interval.high < 0
        assert clear == (one.p <= SIGNIFICANCE) == (one.verdict is not Verdict.OPEN)
        assert (one.verdict is Verdict.ABOVE) == (one.interval.low > 0)


@pytest.mark.parametrize("seeds", [1, 2, 3, 4])
def test_too_few_seeds_say_nothing_however_large_the_difference(seeds: int) -> None:
    rng = np.random.default_rng(0)
    for study in (paired(seeds, 0.01, 0.0, effect=5.0), independent(seeds, 0.01, 0.0, effect=5.0)):
        (one,) = estimate_differences([study(rng)], FAMILIES, Claim.TRAINING)
        assert (one.verdict, one.interval, one.p) == (Verdict.TOO_FEW, None, None)
        assert one.estimate == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize("claim", [Claim.POLICY, Claim.CONTROLLER])
def test_more_seeds_than_one_are_more_than_one_policy(claim: Claim) -> None:
    with pytest.raises(ValueError, match=f"about {claim} takes the scores of one training seed"):
        estimate_differences([Contrast(np.zeros((5, 4)), np.zeros((1, 4)), paired=True)], list("aabb"), claim)


def test_without_effects_of_instances_it_is_students_or_welchs_test_of_the_seeds() -> None:
    rng = np.random.default_rng(1)
    means = np.array([0.01, 0.03, -0.02, 0.05, 0.02])
    values = means[:, None] + np.tile([0.1, -0.1], (5, 21)) * np.array([1, -1, 1, -1, 0])[:, None]
    own = rng.normal(0.1, 0.1, (6, INSTANCES))
    first, second = rng.normal(0, 0.01, 5), rng.normal(0.01, 0.05, 5)
    constant = np.zeros(INSTANCES)
    contrasts = [
        (Contrast(values, np.zeros((1, INSTANCES)), paired=True), ["a"] * INSTANCES, stats.ttest_1samp(means, 0)),
        (Contrast(own, np.zeros((6, INSTANCES)), paired=True), None, stats.ttest_1samp(own.mean(1), 0)),
        (
            Contrast(first[:, None] + constant, second[:, None] + constant, paired=False),
            FAMILIES,
            stats.ttest_ind(first, second, equal_var=False),
        ),
    ]
    for contrast, families, expected in contrasts:
        (found,) = estimate_differences([contrast], families, Claim.TRAINING)
        assert found.p == pytest.approx(expected.pvalue)
        interval = found.interval.low, found.interval.high
        assert interval == pytest.approx(tuple(expected.confidence_interval(LEVEL)))


def test_what_does_not_depend_on_seeds_has_the_interval_of_its_instances() -> None:
    values = np.random.default_rng(5).normal(0.5, 0.1, (1, 30))
    expected = stats.ttest_1samp(values[0], 0).confidence_interval(LEVEL)
    for repeated in (values, np.tile(values, (5, 1))):
        found = mean_interval(repeated, ["a"] * 30)
        assert (found.low, found.high) == pytest.approx(tuple(expected))


def test_families_are_strata_and_do_not_widen_the_interval() -> None:
    rng = np.random.default_rng(3)
    values = np.arange(7.0)[FAMILY] + rng.normal(0, 0.1, (5, INSTANCES))
    stratified, pooled = mean_interval(values, FAMILIES), mean_interval(values, ["any"] * INSTANCES)
    assert pooled.high - pooled.low > 5 * (stratified.high - stratified.low)


def test_equal_arms_are_equal() -> None:
    for paired_ in (True, False):
        one = Contrast(np.full((5, INSTANCES), 0.5), np.full((5, INSTANCES), 0.5), paired=paired_)
        (found,) = estimate_differences([one], FAMILIES, Claim.TRAINING)
        assert (found.p, found.verdict, found.estimate) == (1, Verdict.OPEN, 0)


def test_more_questions_make_a_claim_harder() -> None:
    contrast = paired(5, 0.02, 0.0, effect=0.02)(np.random.default_rng(0))
    alone, among = (estimate_differences([contrast] * count, FAMILIES, Claim.TRAINING)[0] for count in (1, 3))
    assert alone.p is not None
    assert among.p == pytest.approx(min(3 * alone.p, 1))
    assert among.interval == alone.interval


def test_families_of_one_instance_are_told_apart_as_one_family() -> None:
    values = np.random.default_rng(6).normal(0, 1, (3, 4))
    assert mean_interval(values, list("abcd")) == mean_interval(values, list("aaaa"))


@pytest.mark.parametrize(
    ("shape", "families", "message"),
    [((3, 1), ["a"], "a family each"), ((3, 4), ["a"], "a family each"), ((1, 4), None, "at least two seeds")],
)
def test_what_has_no_interval_is_refused(shape: tuple[int, int], families: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean_interval(np.zeros(shape), families)


def test_scores_that_do_not_belong_together_are_refused() -> None:
    for second in (np.zeros((4, 3)), np.zeros((5, 2))):
        with pytest.raises(ValueError, match="differ in seeds or instances"):
            estimate_differences([Contrast(np.zeros((5, 3)), second, paired=False)], ["x"] * 3, Claim.TRAINING)


@pytest.mark.parametrize(("claim", "seeds"), [*((claim, 1) for claim in Claim), (Claim.TRAINING, 5)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(value: float, claim: Claim, seeds: int) -> None:
    for place in (0, 1):
        for paired_ in (True, False):
            scores = np.random.default_rng(0).normal(0, 1, (2, seeds, INSTANCES))
            scores[place, seeds - 1, 2] = value
            with pytest.raises(RunError, match=rf"score of training seed {seeds - 1} on instance 2"):
                estimate_differences([Contrast(scores[0], scores[1], paired=paired_)], FAMILIES, claim)
            with pytest.raises(RunError, match="cannot be compared"):
                mean_interval(scores[place], FAMILIES)


def test_the_probability_of_improvement_counts_ties_half_and_pairs_seeds():
    first, second = np.array([[1.0, 1.0, 0.0, 0.0]]), np.array([[0.0, 1.0, 1.0, 0.0]])
    assert probability_of_improvement(first, second, paired=True) == 0.5
    assert probability_of_improvement(first + 2, first, paired=True) == 1
    first, second = np.array([[1.0], [3.0]]), np.array([[0.0], [2.0]])
    assert probability_of_improvement(first, second, paired=True) == 1
    assert probability_of_improvement(first, second, paired=False) == 0.75
    assert probability_of_improvement(first, second[1:], paired=True) == 0.5


def test_holm_is_the_textbook_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_interquartile_mean_ignores_the_tails():
    values = np.array([[-1e6, 0.0, 1.0, 2.0], [3.0, 1e6, 1.5, 1.5]])
    assert interquartile_mean(values) == pytest.approx(np.mean([1.0, 1.5, 1.5, 2.0]))
