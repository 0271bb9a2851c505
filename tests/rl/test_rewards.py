"""Reward modes are what their formulas say, and no trick pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from esper.lifecycle.stages import Stage
from esper.rl.rewards import MODES, Facts, Moment, RewardSettings, RewardSpec, Scheme, Worth, rent_due
from esper.rl.rewards import total as sum_of
from esper.rl.rewards.scheme import in_turns
from esper.rl.rewards.terms import PROGRESS
from esper.rl.rewards.weights import Weights

RENT = 0.1
BASE = 0.4
"""Score of the host alone, in both families."""


@dataclass(frozen=True)
class Seed:
    """What one slot holds at one moment, in a world where contributions add up."""

    stage: Stage = Stage.DORMANT
    alpha: float = 0.0
    contribution: float = 0.0
    """At full alpha."""
    size: float = 0.0
    """Parameters over the host's."""

    @property
    def worth(self) -> float:
        return self.alpha * self.contribution


EMPTY = Seed()


def moment(slots: Sequence[Seed], finished: bool = False) -> Moment:
    """One network; at the end only fossils count."""
    counted = [one if not finished or one.stage is Stage.FOSSILIZED else replace(one, alpha=0.0) for one in slots]
    worth = Worth(np.array([BASE + sum(one.worth for one in counted)]), np.array([[one.worth for one in counted]]))
    added = np.array([sum(one.size for one in counted if one.alpha > 0)])
    due = rent_due(added, np.ones(1), np.array([RENT]))
    stage = np.array([[one.stage for one in slots]], np.int8)
    return Moment(worth, worth, due, 2 * due, stage, np.array([[one.alpha for one in slots]]))


@dataclass(frozen=True)
class Tick:
    """What a step led to."""

    slots: tuple[Seed, ...]
    acted: bool = False
    pruned_age: int = -1


def rewards_of(settings: RewardSettings, course: Sequence[Tick]) -> list[float]:
    """Of an episode with these steps."""
    scheme, before, paid = Scheme([settings]), Moment.start(1, len(course[0].slots)), list[float]()
    for number, tick in enumerate(course):
        finished = number == len(course) - 1
        after = moment(tick.slots, finished)
        facts = Facts(before, after, np.array([finished]), np.array([tick.acted]), np.array([tick.pruned_age]))
        paid.append(float(sum_of(scheme.pay(facts))[0]))
        before = after
    return paid


def total(settings: RewardSettings, course: Sequence[Tick]) -> float:
    return sum(rewards_of(settings, course))


def free(mode: str, family: str = "accuracy") -> RewardSettings:
    """The mode without costs of what a controller does."""
    return priced(mode, family, intervention=0, shock=0, early_prune=0)


def priced(mode: str, family: str, **weights: float) -> RewardSettings:
    """With those of the weights that the mode reads."""
    read = {name: weight for name, weight in weights.items() if name in MODES[mode].weights}
    return RewardSettings.model_validate({"mode": mode, "family": family, **read})


WAYS = [(mode, family) for mode, kind in MODES.items() for family in kind.families]

seeds = st.builds(
    Seed, st.sampled_from(list(Stage)), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-0.3, 0.3), st.floats(0, 2)
)
courses = st.lists(st.builds(Tick, st.tuples(seeds, seeds), st.booleans(), st.integers(-1, 9)), min_size=1, max_size=12)


@pytest.mark.parametrize(("mode", "family"), WAYS)
@given(course=courses)
def test_what_is_advanced_is_taken_back(mode: str, family: str, course: list[Tick]) -> None:
    """Without costs every episode pays J of what was committed; escrow pays the fossils' contributions less rent."""
    end = moment(course[-1].slots, finished=True)
    expected = end.accuracy.score[0] - end.parameter_rent[0] - (BASE if mode == "escrow" else 0)
    assert total(free(mode, family), course) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("mode", "family"), WAYS)
@given(course=courses)
def test_costs_are_for_what_was_done_and_nothing_else(mode: str, family: str, course: list[Tick]) -> None:
    settings = priced(mode, family, intervention=0.01, shock=0.02, early_prune=0.03, early_age=4)
    interventions = sum(tick.acted for tick in course)
    early = sum(0 <= tick.pruned_age <= 4 for tick in course)
    alphas = np.array([[0.0, 0.0], *[[seed.alpha for seed in tick.slots] for tick in course]])
    shock = np.square(np.diff(alphas, axis=0)).sum()
    costs = {
        "minimal": 0.03 * early,
        "simplified": 0.01 * interventions,
        "shaped": 0.01 * interventions + 0.02 * shock + 0.03 * early,
    }
    found = total(free(mode, family), course) - total(settings, course)
    assert found == pytest.approx(costs.get(mode, 0.0), abs=1e-9)


def test_outcome_is_the_change_and_sparse_comes_last() -> None:
    course = [Tick((Seed(Stage.BLENDING, 0.5, 0.2),)), Tick((Seed(Stage.FOSSILIZED, 1.0, 0.2),))]
    np.testing.assert_allclose(rewards_of(free("outcome"), course), [BASE + 0.1, 0.1])
    np.testing.assert_allclose(rewards_of(free("sparse"), course), [0, BASE + 0.2])
    np.testing.assert_allclose(rewards_of(free("escrow"), course), [0.1, 0.1])


def test_progress_counts_all_slots() -> None:
    held = Seed(Stage.HOLDING)
    course = [Tick((EMPTY, EMPTY)), Tick((EMPTY, held)), Tick((held, held)), Tick((EMPTY, EMPTY))]
    paid = rewards_of(free("simplified").model_copy(update={"progress": 1.0}), course)
    np.testing.assert_allclose(paid, [0, PROGRESS[Stage.HOLDING], PROGRESS[Stage.HOLDING], BASE - 2])


@pytest.mark.parametrize(("mode", "family"), WAYS)
@given(
    contribution=st.floats(0.08, 0.5),
    size=st.floats(0, 1),
)
def test_holding_a_good_seed_never_pays_more_than_keeping_it(
    mode: str, family: str, contribution: float, size: float
) -> None:
    """Good: worth more than its rent, an intervention, and the risk of them."""
    held = Seed(Stage.HOLDING, 1.0, contribution, size)
    fossil = replace(held, stage=Stage.FOSSILIZED)
    settings = RewardSettings(mode=mode, family=family)
    holding = [Tick((held,))] * 8
    for kept_at in range(1, 8):
        keeping = [*holding[:kept_at], Tick((fossil,), acted=True), *[Tick((fossil,))] * (7 - kept_at)]
        assert total(settings, keeping) > total(settings, holding)


def test_each_environment_is_paid_by_its_own_mode() -> None:
    outcome, sparse = RewardSettings(), RewardSettings(mode="sparse")
    settings = [outcome, sparse, outcome]
    one = moment([Seed(Stage.HOLDING, 1.0, 0.2)])
    before, after = Moment.start(3, 1), one.where(np.ones(1, np.bool_), one)
    three = Moment(
        *(
            Worth(np.repeat(worth.score, 3), np.repeat(worth.contribution, 3, 0))
            for worth in (after.accuracy, after.loss)
        ),
        np.repeat(after.parameter_rent, 3),
        np.repeat(after.flops_rent, 3),
        np.repeat(after.stage, 3, 0),
        np.repeat(after.alpha, 3, 0),
    )
    facts = Facts(before, three, np.zeros(3, np.bool_), np.zeros(3, np.bool_), np.full(3, -1))
    np.testing.assert_allclose(sum_of(Scheme(settings).pay(facts)), [BASE + 0.2, 0, BASE + 0.2])


def test_groups_take_turns() -> None:
    outcome, sparse = RewardSettings(), RewardSettings(mode="sparse")
    modes = [one.mode for one in in_turns([outcome, sparse], 8, group=2)]
    assert modes == ["outcome", "outcome", "sparse", "sparse"] * 2


def test_rent_may_be_paid_on_flops() -> None:
    course = [Tick((Seed(Stage.FOSSILIZED, 1.0, 0.2, 1.0),))]
    on_parameters = total(free("outcome"), course)
    on_flops = total(free("outcome").model_copy(update={"rent_on": "flops"}), course)
    assert on_parameters - on_flops == pytest.approx(RENT * np.log(2))


def test_a_moment_is_of_each_network_apart() -> None:
    one, other = moment([Seed(Stage.HOLDING, 1.0, 0.2)]), Moment.start(1, 1)
    assert one.where(np.array([True]), other).accuracy.score == one.accuracy.score
    assert one.where(np.array([False]), other).accuracy.score == 0


def test_rent_is_logarithmic() -> None:
    added, host, rent = np.array([0.0, 100.0]), np.array([50.0, 50.0]), np.array([0.1, 0.1])
    np.testing.assert_allclose(rent_due(added, host, rent), [0, 0.1 * np.log(3)])


def test_the_cost_of_interventions_may_set_in_late() -> None:
    settings = RewardSettings(mode="shaped", intervention=0.01, intervention_after=0.4)
    costs = [settings.at(progress).intervention for progress in (0, 0.2, 0.4, 0.55, 0.7, 0.9, 1.0)]
    np.testing.assert_allclose(costs, [0, 0, 0, 0.005, 0.01, 0.01, 0.01], atol=1e-12)
    assert settings.at(0.2).shock == settings.shock
    charged = RewardSettings(mode="shaped")
    assert charged.at(0.0) == charged


SPEC = TypeAdapter(RewardSpec)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sparse", [("sparse", "accuracy")]),
        ({"mode": "shaped", "family": "loss"}, [("shaped", "loss")]),
        (["outcome", {"mode": "escrow"}], [("outcome", "accuracy"), ("escrow", "accuracy")]),
    ],
)
def test_a_specification_is_a_name_a_mode_or_several(given: object, expected: list[tuple[str, str]]) -> None:
    assert [(one.mode, one.family) for one in SPEC.validate_python(given)] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("outcom", "unknown reward mode 'outcom', did you mean 'outcome'"),
        ({"mode": "sparse", "family": "loss"}, "pays in accuracy, not in loss; modes for loss are outcome, shaped"),
        (["outcome", {"mode": "minimal", "family": "loss"}], "'minimal' pays in accuracy"),
        ([], "at least 1"),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SPEC.validate_python(given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight", sorted(Weights.model_fields.keys() - {"rent_on"}))
def test_a_weight_acts_or_is_refused(mode: str, weight: str) -> None:
    """At the whole cost of interventions in the end, and before."""
    held, ramped = Seed(Stage.HOLDING, 1.0, 0.2), Seed(Stage.BLENDING, 0.5, 0.2)
    course = [
        Tick((EMPTY, ramped), acted=True),
        Tick((held, held), pruned_age=2),
        Tick((EMPTY, EMPTY), acted=True, pruned_age=6),
    ]
    usual = RewardSettings(mode=mode)
    other = usual.model_copy(update={weight: 9 if weight == "early_age" else 0.4})  # which checks nothing
    acts = any(rewards_of(usual.at(now), course) != rewards_of(other.at(now), course) for now in (0.2, 1.0))
    assert acts == (weight in MODES[mode].weights)
    changed = {"mode": mode, weight: getattr(other, weight)}
    if acts:
        assert RewardSettings.model_validate(changed) == other
    else:
        with pytest.raises(ValidationError, match=f"'{mode}' does not read {weight}: leave it out, or choose .*shaped"):
            RewardSettings.model_validate(changed)
