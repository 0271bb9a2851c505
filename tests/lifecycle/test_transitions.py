"""The life of seeds, step by step."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import IllegalActionError
from esper.lifecycle.actions import Blend, Curve, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Reason, Rules
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import (
    LONGEST_RAMP,
    Cause,
    Step,
    Transitions,
    add_fossils,
    compute_alpha,
    compute_ramp_progress,
    concatenate_transitions,
    remove_seeds,
    step,
)
from lifecycle.support import (
    DEFAULT,
    SHADOW,
    assert_sound,
    good_measurements,
    play,
)
from open_rules import open_rules

WAIT = make_wait_actions(1)[0]
EMPTY = SeedTable.dormant(1, 1)
GERMINATE = make_action(Op.GERMINATE, blueprint=2)


def stages(table: SeedTable, rules: Rules, *actions: np.ndarray) -> list[str]:
    """The stage of slot 0 after each action."""
    names: list[str] = []
    for chosen in actions:
        table = play(table, rules, chosen).table
        names.append(Stage(table.stage[0, 0]).name)
    return names


def only_change(result: Step) -> tuple[object, ...]:
    """The one change of stage in a step."""
    changes = result.transitions
    assert len(changes) == 1
    return (
        int(changes.env[0]),
        int(changes.slot[0]),
        Stage(changes.before[0]),
        Stage(changes.after[0]),
        int(changes.blueprint[0]),
        Cause(changes.cause[0]),
        Reason(changes.reason[0]),
    )


def holding(rules: Rules = DEFAULT) -> SeedTable:
    """A seed at full alpha."""
    return play(EMPTY, rules, GERMINATE, *[WAIT] * 4).table


PRUNED_AT_ONCE = make_action(Op.PRUNE, alpha_speed=8)
LIVES = {
    "blends in the next step": (
        [GERMINATE, *[WAIT] * 4, make_action(Op.FOSSILIZE), WAIT],
        ["GERMINATED", *["BLENDING"] * 3, "HOLDING", "FOSSILIZED", "FOSSILIZED"],
    ),
    "trains in isolation until it is advanced": (
        [GERMINATE, *[WAIT] * 4, make_action(Op.ADVANCE), *[WAIT] * 3],
        ["GERMINATED", *["TRAINING"] * 4, *["BLENDING"] * 3, "HOLDING"],
    ),
    "is pruned by a ramp": (
        [GERMINATE, *[WAIT] * 4, make_action(Op.PRUNE, alpha_speed=3), *[WAIT] * 4],
        ["GERMINATED", *["BLENDING"] * 3, "HOLDING", *["BLENDING"] * 3, "PRUNED", "EMBARGOED"],
    ),
    "has no weight to ramp": ([GERMINATE, PRUNED_AT_ONCE], ["GERMINATED", "PRUNED"]),
    "has no weight to ramp in isolation": (
        [GERMINATE, WAIT, WAIT, PRUNED_AT_ONCE],
        ["GERMINATED", "TRAINING", "TRAINING", "PRUNED"],
    ),
}


@pytest.mark.parametrize("name", LIVES)
def test_a_life_has_its_stages(name: str) -> None:
    actions, expected = LIVES[name]
    assert stages(EMPTY, SHADOW if "isolation" in name else DEFAULT, *actions) == expected


def test_every_change_of_stage_is_recorded() -> None:
    """With its cause, its gate's reason and the seed's blueprint, from birth to the next dormancy."""
    events = [
        only_change(result)
        for result in _results(GERMINATE, WAIT, WAIT, WAIT, WAIT, make_action(Op.PRUNE, alpha_speed=0), *[WAIT] * 7)
        if len(result.transitions)
    ]
    assert [event[2:] for event in events] == [
        (Stage.DORMANT, Stage.GERMINATED, 2, Cause.GERMINATE, Reason.NO_GATE),
        (Stage.GERMINATED, Stage.BLENDING, 2, Cause.TICK, Reason.PASSED),
        (Stage.BLENDING, Stage.HOLDING, 2, Cause.TICK, Reason.PASSED),
        (Stage.HOLDING, Stage.PRUNED, 2, Cause.PRUNE, Reason.NO_GATE),
        (Stage.PRUNED, Stage.EMBARGOED, -1, Cause.TICK, Reason.NO_GATE),
        (Stage.EMBARGOED, Stage.RESETTING, -1, Cause.TICK, Reason.NO_GATE),
        (Stage.RESETTING, Stage.DORMANT, -1, Cause.TICK, Reason.NO_GATE),
    ]


def _results(*actions: np.ndarray) -> list[Step]:
    table, results = EMPTY, []
    for chosen in actions:
        results.append(play(table, DEFAULT, chosen))
        table = results[-1].table
    return results


def test_ages_stop_at_the_largest_int16() -> None:
    largest = np.iinfo(np.int16).max
    old = holding()
    old = replace(old, stage_age=np.full((1, 1), largest, np.int16), seed_age=np.full((1, 1), largest, np.int16))
    older = play(old, DEFAULT, WAIT).table
    assert (older.stage_age[0, 0], older.seed_age[0, 0]) == (largest, largest)


def test_a_rollback_removes_seeds_at_once_and_lets_no_time_pass() -> None:
    table, everything = SeedTable.dormant(2, 2), (good_measurements(2, 2), DEFAULT, np.ones((2, 2, 3), np.bool_))
    for actions in ((GERMINATE, GERMINATE), (make_action(Op.GERMINATE, 1), WAIT)):
        table = step(table, everything[0], np.stack(actions), *everything[1:]).table
    before = table.copy()
    chosen = np.array([[True, True], [False, True]])
    after, changes = remove_seeds(table, chosen)
    assert [Stage(stage).name for stage in after.stage.ravel()] == ["PRUNED", "PRUNED", "BLENDING", "DORMANT"]
    assert after.stage_age[0].tolist() == [1, 1]
    assert not after.seed_age[0].any()
    assert (changes.env.tolist(), changes.slot.tolist()) == ([0, 0], [0, 1])
    assert changes.cause.tolist() == [Cause.ROLLBACK] * 2
    assert changes.blueprint.tolist() == [2, 0]
    for field in fields(SeedTable):
        np.testing.assert_array_equal(getattr(table, field.name), getattr(before, field.name))
        np.testing.assert_array_equal(getattr(after, field.name)[1], getattr(before, field.name)[1])


def test_a_rollback_may_take_a_fossil() -> None:
    fossil = play(holding(), DEFAULT, make_action(Op.FOSSILIZE)).table
    after, changes = remove_seeds(fossil, np.array([[True]]))
    assert (Stage(changes.before[0]), Stage(after.stage[0, 0])) == (Stage.FOSSILIZED, Stage.PRUNED)
    assert stages(after, DEFAULT, *[WAIT] * 7)[-1] == "DORMANT"


def test_changes_that_follow_one_another_make_one_record() -> None:
    first = play(EMPTY, DEFAULT, GERMINATE)
    second = remove_seeds(first.table, np.array([[True]]))[1]
    both = concatenate_transitions([first.transitions, second])
    assert both.after.tolist() == [Stage.GERMINATED, Stage.PRUNED]
    assert both.cause.tolist() == [Cause.GERMINATE, Cause.ROLLBACK]
    assert len(concatenate_transitions([Transitions.none(), Transitions.none()])) == 0


# Networks may start with finished seeds: sound, permanent, and refused where they cannot live.


RULES = open_rules()
COMPATIBLE = np.ones((2, 3, 2), np.bool_)
GIVEN = np.array([[1, -1, 0], [-1, -1, -1]])
BLENDS = np.array([[Blend.GATE, Blend.ADD, Blend.MULTIPLY], [Blend.ADD] * 3])


def test_fossils_count_fully_from_the_start_and_stay() -> None:
    table, changes = add_fossils(SeedTable.dormant(2, 3), GIVEN, BLENDS, COMPATIBLE)
    assert_sound(table, RULES)
    assert (table.stage == Stage.FOSSILIZED).tolist() == (GIVEN >= 0).tolist()
    assert table.blueprint.tolist() == GIVEN.tolist()
    assert table.blend.tolist() == BLENDS.tolist()
    assert changes.blend.tolist() == [Blend.GATE, Blend.MULTIPLY]
    assert table.alpha.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert [(env, slot) for env, slot in zip(changes.env, changes.slot, strict=True)] == [(0, 0), (0, 2)]
    assert changes.born.all()
    assert set(changes.cause.tolist()) == {Cause.START}
    for _ in range(3):
        after = step(table, SeedMeasurements.none(2, 3), make_wait_actions(2), RULES, COMPATIBLE)
        assert len(after.transitions) == 0
        assert_sound(after.table, RULES)
        assert after.table.alpha.tolist() == table.alpha.tolist()
        table = after.table


def test_nothing_given_changes_nothing() -> None:
    before = SeedTable.dormant(2, 3)
    table, changes = add_fossils(before, np.full((2, 3), -1), BLENDS, COMPATIBLE)
    assert len(changes) == 0
    assert all(np.array_equal(vars(table)[name], value) for name, value in vars(before).items())


def test_slots_that_are_taken_or_do_not_suit_are_refused() -> None:
    taken, _ = add_fossils(SeedTable.dormant(2, 3), GIVEN, BLENDS, COMPATIBLE)
    with pytest.raises(
        IllegalActionError, match=r"network 0 .* slot 0, which is in stage FOSSILIZED: choose a dormant"
    ):
        add_fossils(taken, GIVEN, BLENDS, COMPATIBLE)
    unfit = COMPATIBLE.copy()
    unfit[0, 2, 0] = False
    with pytest.raises(IllegalActionError, match="network 0 cannot start with blueprint 0 in slot 2"):
        add_fossils(SeedTable.dormant(2, 3), GIVEN, BLENDS, unfit)


# Alpha's way in closed form.


def test_targets_are_reached_exactly() -> None:
    """In float32, start + (target - start) need not be target."""
    start = np.random.default_rng(0).random(1000, dtype=np.float32)
    target = np.float32(0.1) * np.ones_like(start)
    assert np.any(start + (target - start) != target), "the case this test is about"
    full = np.full(1000, 5, np.int16)
    assert np.array_equal(compute_alpha(start, target, full, full, np.zeros(1000, np.int8)), target)


@given(st.sampled_from(Curve), st.integers(1, LONGEST_RAMP))
def test_curves_rise_from_zero_to_one_and_are_symmetric(curve: Curve, duration: int) -> None:
    values = [compute_ramp_progress(curve, elapsed / duration) for elapsed in range(duration + 1)]
    assert (values[0], values[-1]) == (0, 1)
    assert all(earlier < later for earlier, later in pairwise(values))
    assert values == pytest.approx([1 - value for value in reversed(values)])
