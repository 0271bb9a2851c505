"""Reward modes are what their formulas say, no trick pays, and what they are made of can be worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from esper.errors import ConfigError
from esper.growth.blueprints.registry import get
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.table import Stage
from esper.numerics.arrays import map_arrays
from esper.rl.rewards import (
    MODES,
    PROGRESS,
    WEIGHTS,
    RewardInputs,
    RewardSettings,
    RewardSpec,
    RewardState,
    assign_rewards,
    compute_rent,
    compute_rewards,
    group_by_settings,
    register_reward,
    sum_reward_terms,
)
from rl.short import SUITE, episodes, instances

MLP, CONV = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("token_conv")
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


def state_of(slots: Sequence[Seed], finished: bool = False) -> RewardState:
    """One network; at the end only fossils count."""
    counted = [one if not finished or one.stage is Stage.FOSSILIZED else replace(one, alpha=0.0) for one in slots]
    score, contribution = (
        np.array([BASE + sum(one.worth for one in counted)]),
        np.array([[one.worth for one in counted]]),
    )
    added = np.array([sum(one.size for one in counted if one.alpha > 0)])
    due = compute_rent(added, np.ones(1), np.array([RENT]))
    stage = np.array([[one.stage for one in slots]], np.int8)
    return RewardState(
        {"accuracy": score, "loss": score},
        {"accuracy": contribution, "loss": contribution},
        {"parameters": due, "flops": 2 * due},
        stage,
        np.array([[one.alpha for one in slots]]),
    )


@dataclass(frozen=True)
class Tick:
    """What a step led to."""

    slots: tuple[Seed, ...]
    acted: bool = False
    pruned_age: int = -1


def rewards_of(settings: RewardSettings, course: Sequence[Tick]) -> list[float]:
    """Of an episode with these steps."""
    before, paid = RewardState.zeros(1, len(course[0].slots)), list[float]()
    for number, tick in enumerate(course):
        finished = number == len(course) - 1
        after = state_of(tick.slots, finished)
        facts = np.array([finished]), np.array([tick.acted]), np.array([tick.pruned_age])
        terms = compute_rewards(RewardInputs(before, after, *facts), {settings: np.ones(1, np.bool_)})
        paid.append(float(sum_reward_terms(terms)[0]))
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


@pytest.mark.landing
@pytest.mark.parametrize(("mode", "family"), WAYS)
@given(course=courses)
def test_what_is_advanced_is_taken_back(mode: str, family: str, course: list[Tick]) -> None:
    """Without costs every episode pays J of what was committed; escrow pays the fossils' contributions less rent."""
    end = state_of(course[-1].slots, finished=True)
    expected = end.score["accuracy"][0] - end.rent["parameters"][0] - (BASE if mode == "escrow" else 0)
    assert total(free(mode, family), course) == pytest.approx(expected, abs=1e-9)


@pytest.mark.landing
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


@pytest.mark.landing
@pytest.mark.parametrize(("mode", "family"), WAYS)
@given(contribution=st.floats(0.08, 0.5), size=st.floats(0, 1))
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
    after = state_of([Seed(Stage.HOLDING, 1.0, 0.2)])
    three = map_arrays(lambda part: np.repeat(part, 3, 0), after)
    nobody = np.zeros(3, np.bool_)
    inputs = RewardInputs(RewardState.zeros(3, 1), three, nobody, nobody, np.full(3, -1))
    np.testing.assert_allclose(
        sum_reward_terms(compute_rewards(inputs, group_by_settings(settings))), [BASE + 0.2, 0, BASE + 0.2]
    )


def test_groups_take_turns() -> None:
    outcome, sparse = RewardSettings(), RewardSettings(mode="sparse")
    modes = [one.mode for one in assign_rewards([outcome, sparse], 8, group=2)]
    assert modes == ["outcome", "outcome", "sparse", "sparse"] * 2


def test_rent_may_be_paid_on_flops() -> None:
    course = [Tick((Seed(Stage.FOSSILIZED, 1.0, 0.2, 1.0),))]
    on_parameters = total(free("outcome"), course)
    on_flops = total(free("outcome").model_copy(update={"rent_on": "flops"}), course)
    assert on_parameters - on_flops == pytest.approx(RENT * np.log(2))


def test_the_cost_of_interventions_may_set_in_late() -> None:
    settings = RewardSettings(mode="shaped", intervention=0.01, intervention_after=0.4)
    costs = [settings.at_progress(progress).intervention for progress in (0, 0.2, 0.4, 0.55, 0.7, 0.9, 1.0)]
    np.testing.assert_allclose(costs, [0, 0, 0, 0.005, 0.01, 0.01, 0.01], atol=1e-12)
    assert settings.at_progress(0.2).shock == settings.shock
    charged = RewardSettings(mode="shaped")
    assert charged.at_progress(0.0) == charged


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
        ({"mode": "sparse", "family": "loss"}, "is for accuracy, not for loss; modes for loss are outcome, shaped"),
        (["outcome", {"mode": "minimal", "family": "loss"}], "'minimal' is for accuracy"),
        ([], "at least 1"),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SPEC.validate_python(given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight", WEIGHTS)
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
    acts = any(
        rewards_of(usual.at_progress(now), course) != rewards_of(other.at_progress(now), course) for now in (0.2, 1.0)
    )
    assert acts == (weight in MODES[mode].weights)
    changed = {"mode": mode, weight: getattr(other, weight)}
    if acts:
        assert RewardSettings.model_validate(changed) == other
    else:
        with pytest.raises(ValidationError, match=f"'{mode}' does not use {weight}: remove it, or choose .*shaped"):
            RewardSettings.model_validate(changed)


# What rewards are made of, held to what can be worked out by hand


def test_scores_in_loss_are_relative_to_guessing() -> None:
    running = episodes(instances(4))
    result = running.step(make_wait_actions(4))
    chance = np.log(SUITE.classes)
    np.testing.assert_allclose(result.reward_inputs.after.score["loss"], 1 - result.evaluation.loss / chance)
    np.testing.assert_allclose(result.reward_inputs.after.score["accuracy"], result.evaluation.accuracy)
    assert not result.reward_inputs.before.score["loss"].any()


def test_contributions_are_those_of_blended_seeds_in_both_units() -> None:
    running = episodes(instances(4))
    result = running.step(np.stack([make_action(Op.GERMINATE, 1, MLP)] * 4))
    assert not result.reward_inputs.after.contribution["accuracy"].any(), "a newborn does not count yet"
    result = running.step(make_wait_actions(4))
    found, chance = result.reward_inputs.after, np.log(SUITE.classes)
    np.testing.assert_allclose(found.contribution["accuracy"][:, 1], result.evaluation.accuracy_contribution[:, 1])
    np.testing.assert_allclose(found.contribution["loss"][:, 1], result.evaluation.loss_contribution[:, 1] / chance)
    assert not found.contribution["loss"][:, [0, 2]].any()
    next_one = running.step(make_wait_actions(4)).reward_inputs
    np.testing.assert_array_equal(next_one.before.contribution["loss"], found.contribution["loss"])


def test_rent_is_due_on_parameters_and_on_flops() -> None:
    running = episodes(instances(7))
    for actions in (np.stack([make_action(Op.GERMINATE, 0, CONV)] * 7), make_wait_actions(7)):
        found = running.step(actions).reward_inputs.after
    for row, instance in enumerate(running.instances):
        site = replace(running.population.execution.sites[0], width=instance.widths[0])
        kind = get("token_conv")
        for due, added, host in (
            (found.rent["parameters"], kind.cost_at(site).parameters, SUITE.parameters(instance)),
            (found.rent["flops"], kind.cost_at(site).flops, SUITE.flops(instance)),
        ):
            np.testing.assert_allclose(due[row], instance.rent * np.log1p(added / host))
    assert len({one.widths for one in running.instances}) > 1, "hosts of several widths"


def test_actions_and_pruned_ages_are_recorded() -> None:
    running = episodes(instances(3))
    running.step(np.stack([make_action(Op.GERMINATE, 0, MLP)] * 3))
    for _ in range(3):
        running.step(make_wait_actions(3))
    found = running.step(
        np.stack([make_action(Op.PRUNE, 0), *make_wait_actions(1), make_action(Op.GERMINATE, 1, MLP)])
    ).reward_inputs
    assert found.acted.tolist() == [True, False, True]
    assert found.pruned_age.tolist() == [4, -1, -1]


def test_a_restarted_network_begins_from_nothing() -> None:
    running = episodes(instances(3))
    running.step(make_wait_actions(3))
    running.restart(np.array([1]), instances(4)[3:])
    before = running.step(make_wait_actions(3)).reward_inputs.before.score["accuracy"]
    assert (before > 0).tolist() == [True, False, True]


def test_a_reward_of_ones_own_is_named_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.rl.rewards.MODES", dict(MODES))

    @register_reward("interest", families=("accuracy", "loss"), weights=("shock",))
    def pay_interest(inputs: RewardInputs, settings: RewardSettings) -> dict[str, np.ndarray]:
        return {"interest": settings.shock * inputs.after.score[settings.family]}

    (settings,) = SPEC.validate_python({"mode": "interest", "family": "loss", "shock": 0.5})
    course = [Tick((EMPTY, Seed(Stage.HOLDING, 1.0, 0.2)))]
    assert sum(rewards_of(settings, course)) != 0
    with pytest.raises(ValidationError, match="'interest' does not use progress"):
        SPEC.validate_python({"mode": "interest", "progress": 0.5})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (1.0, r"'mine' must give its terms by name, each an array \[1\] of real numbers, but it gives float"),
        ({}, "but it gives none"),
        ({"late": 1.0}, "but 'late' is float"),
        ({"late": np.zeros((2, 1))}, r"but 'late' is \[2, 1\]"),
        ({"late": np.zeros(1, complex)}, r"of real numbers, but 'late' is \[1\] of complex128"),
        ({"rollback": np.zeros(1)}, "'rollback' is the governor's penalty, choose another name"),
    ],
)
def test_a_reward_that_returns_no_terms_is_refused(given: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.rl.rewards.MODES", dict(MODES))
    register_reward("mine")(lambda inputs, settings: given)
    (settings,) = SPEC.validate_python("mine")
    with pytest.raises(ConfigError, match=words):
        rewards_of(settings, [Tick((EMPTY, EMPTY))])


def test_the_same_definition_may_be_run_again_and_another_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.rl.rewards.MODES", dict(MODES))

    def define(worth: float) -> Any:
        def pay(inputs: RewardInputs, settings: RewardSettings) -> dict[str, np.ndarray]:
            return {"worth": np.full(len(inputs.finished), worth)}

        return register_reward("mine")(pay)

    define(1.0)
    define(2.0)
    (settings,) = SPEC.validate_python("mine")
    assert rewards_of(settings, [Tick((EMPTY, EMPTY))]) == [2.0]
    with pytest.raises(ConfigError, match="'mine' is taken by .*define.<locals>.pay: choose another"):
        register_reward("mine")(lambda inputs, settings: {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "outcome"}, "'outcome' is taken by pay_outcome"),
        ({"name": "mine", "families": ["error"]}, "no family 'error'; choose from accuracy, loss"),
        ({"name": "mine", "weights": ["shocks"]}, "no weight 'shocks'; choose from progress"),
        ({"name": lambda inputs, settings: {}}, r"needs a name, as in @register_reward\('mine'\), not a function"),
        ({"name": ""}, "needs a name"),
        ({"name": "mine", "families": []}, r"give families and weights as lists, such as \['accuracy'\]"),
        ({"name": "mine", "families": "loss"}, "give families and weights as lists"),
        ({"name": "mine", "weights": None}, "give families and weights as lists"),
    ],
)
def test_a_reward_that_makes_no_sense_is_not_registered(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        register_reward(**options)(lambda inputs, settings: {})
    assert "mine" not in MODES


def test_only_functions_pay_and_two_without_a_name_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.rl.rewards.MODES", dict(MODES))
    with pytest.raises(ConfigError, match="'mine' is an int, 3: decorate a function"):
        register_reward("mine")(3)
    register_reward("mine")(lambda inputs, settings: {})
    with pytest.raises(ConfigError, match="'mine' is taken by"):
        register_reward("mine")(lambda inputs, settings: {})
