"""The vectorised lifecycle against the plain one in `reference`."""

import math
from collections import Counter
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest

from esper.errors import IllegalActionError
from esper.lifecycle.actions import Head, Op, make_action, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Rules, is_legal, legal_actions
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import Cause, finish_growth, step
from esper.numerics.arrays import Bools, Ints
from lifecycle import reference
from lifecycle.support import (
    RULE_SETS,
    assert_obeyed,
    assert_prunable,
    assert_sound,
    assert_step_is_sound,
    every_action,
    good_measurements,
    measurement_rows,
    random_compatibility,
    random_measurements,
    sample,
)


def measured(measurements: SeedMeasurements) -> list[list[reference.Measured]]:
    columns = [getattr(measurements, field.name).tolist() for field in fields(reference.Measured)]
    return [[reference.Measured(*slot) for slot in zip(*row, strict=True)] for row in zip(*columns, strict=True)]


def as_table(population: list[list[reference.Slot]]) -> SeedTable:
    """The reference's population as arrays."""
    table = SeedTable.dormant(len(population), len(population[0]))
    for number, environment in enumerate(population):
        for index, slot in enumerate(environment):
            table.stage[number, index] = slot.stage
            table.stage_age[number, index] = slot.stage_age
            seed = slot.seed
            if seed is None:
                continue
            table.seed_age[number, index] = seed.age
            table.blueprint[number, index] = seed.blueprint
            table.blend[number, index] = seed.blend
            table.alpha[number, index] = seed.alpha
            table.alpha_start[number, index] = seed.ramp.start
            table.alpha_target[number, index] = seed.ramp.target
            table.alpha_elapsed[number, index] = seed.ramp.elapsed
            table.alpha_duration[number, index] = seed.ramp.duration
            table.alpha_curve[number, index] = seed.ramp.curve
            table.pruning[number, index] = seed.pruning
    return table


@pytest.mark.parametrize("name", RULE_SETS)
@pytest.mark.few(4)
def test_tables_verdicts_and_transitions_agree(name: str) -> None:
    """Long random legal sequences with random measurements."""
    environments, slots, blueprints, steps = 16, 3, 4, 200
    rules, generator = RULE_SETS[name], np.random.default_rng(len(name))
    compatible = random_compatibility(environments, slots, blueprints, generator)
    table = SeedTable.dormant(environments, slots)
    population = [[reference.Slot() for _ in range(slots)] for _ in range(environments)]
    seen: Counter[tuple[Stage, Stage]] = Counter()
    for _ in range(steps):
        measurements = random_measurements(environments, slots, generator)
        actions = sample(legal_actions(table, measurements, rules, compatible), generator)
        result = step(table, measurements, actions, rules, compatible)
        facts = measured(measurements)
        reasons = [
            [reference.gate_ahead(slot, fact, rules) for slot, fact in zip(*pair, strict=True)]
            for pair in zip(population, facts, strict=True)
        ]
        for environment, row, chosen in zip(population, facts, actions.tolist(), strict=True):
            reference.step(environment, row, chosen, rules)

        table, changes = result.table, result.transitions
        expected = as_table(population)
        for field in fields(SeedTable):
            mine, other = getattr(table, field.name), getattr(expected, field.name)
            assert mine.dtype == other.dtype, field.name
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6, err_msg=field.name)
        np.testing.assert_array_equal(result.gates, reasons)
        columns = (changes.before, changes.after, changes.blueprint, changes.cause, changes.reason)
        ours = list(zip(changes.env.tolist(), changes.slot.tolist(), *(c.tolist() for c in columns), strict=True))
        theirs = [
            (number, index, *change)
            for number, environment in enumerate(population)
            for index, slot in enumerate(environment)
            for change in slot.log
        ]
        assert ours == theirs
        seen.update((before, after) for _, _, before, after, *_ in theirs)
        for slot in (slot for environment in population for slot in environment):
            slot.log.clear()
    visited = {stage for change in seen for stage in change}
    unreachable = set()
    if rules.isolation == "none":
        unreachable.add(Stage.TRAINING)
    if Op.FOSSILIZE not in rules.operations:
        unreachable.add(Stage.FOSSILIZED)
    assert visited == set(Stage) - unreachable, "the random walk was too short to test every stage"


@pytest.mark.parametrize("name", RULE_SETS)
@pytest.mark.few(4)
def test_masks_agree(name: str) -> None:
    """Of all actions exactly those are legal that the reference finds legal, and each conditional mask is exact."""
    environments, slots, blueprints, steps = 3, 2, 2, 40
    rules, generator = RULE_SETS[name], np.random.default_rng(100 + len(name))
    candidates = every_action(slots, blueprints)
    compatible = random_compatibility(environments, slots, blueprints, generator)
    fits = compatible.tolist()
    table = SeedTable.dormant(environments, slots)
    population = [[reference.Slot() for _ in range(slots)] for _ in range(environments)]
    for _ in range(steps):
        measurements = random_measurements(environments, slots, generator)
        facts = measured(measurements)
        for number, environment in enumerate(population):
            allowed = [
                reference.is_legal(environment, facts[number], row, rules, fits[number]) for row in candidates.tolist()
            ]
            copies = np.full(len(candidates), number)
            masks = legal_actions(table.rows(copies), measurement_rows(measurements, copies), rules, compatible[copies])
            assert is_legal(candidates, masks).tolist() == allowed
            assert_masks_are_exact(masks, candidates[allowed])
        actions = sample(legal_actions(table, measurements, rules, compatible), generator)
        table = step(table, measurements, actions, rules, compatible).table
        for environment, row, chosen in zip(population, facts, actions.tolist(), strict=True):
            reference.step(environment, row, chosen, rules)


def assert_masks_are_exact(masks: ActionMasks, allowed: Ints) -> None:
    """Row 0 of the masks agrees with the list of all ``allowed`` actions ``[N, 8]``."""
    for op in Op:
        with_op = allowed[allowed[:, Head.OP] == op]
        assert masks.op[0, op] == (len(with_op) > 0)
        assert np.flatnonzero(masks.slot[0, op]).tolist() == np.unique(with_op[:, Head.SLOT]).tolist()
        for slot in np.unique(with_op[:, Head.SLOT]):
            with_slot = with_op[with_op[:, Head.SLOT] == slot]
            given = (np.full(masks.environments, op), np.full(masks.environments, slot))
            choices = [np.flatnonzero(masks.find_legal(head, *given)[0]) for head in list(Head)[Head.BLUEPRINT :]]
            for head, legal_choices in zip(list(Head)[Head.BLUEPRINT :], choices, strict=True):
                assert legal_choices.tolist() == np.unique(with_slot[:, head]).tolist(), (op, slot, head)
            assert math.prod(map(len, choices)) == len(with_slot), "later heads depend on op and slot only"
    marginals = [np.isin(np.arange(size), allowed[:, head]) for head, size in zip(Head, masks.sizes, strict=True)]
    assert masks.flat()[0].tolist() == np.concatenate(marginals).tolist()


# Exhaustive: every state that one slot can reach, every kind of measurement, every legal action.


KINDS_OF_MEASUREMENTS = replace(
    SeedMeasurements.none(5, 1),
    probed=np.array([[True], [False], [True], [True], [True]]),
    gradient_healthy=np.array([[True], [False], [True], [True], [True]]),
    contribution=np.array([[1], [1], [np.nan], [1], [-2]], np.float32),
    contribution_age=np.array([[0], [0], [0], [9], [0]], np.int16),
)
"""All good; not probed and unhealthy; not measured; stale; harmful. No gate looks at more than one of them."""
CLOCKED = (Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""Stages whose age the rules ask for."""
LONGEST_WAIT = 8
"""Beyond every threshold of these rules: older slots behave alike."""
CANDIDATES = every_action(slots=1, blueprints=1)


def identities(table: SeedTable) -> list[bytes]:
    """The part of each row that rules depend on: the schedule, not the alpha on it, and ages where they count."""
    age = np.where(np.isin(table.stage, CLOCKED), np.minimum(table.stage_age, LONGEST_WAIT), 1)
    schedule = (table.alpha_target, table.alpha_elapsed, table.alpha_duration, table.alpha_curve, table.pruning)
    columns = (table.stage, age, table.blueprint, table.alpha > 0, *schedule)
    return [row.tobytes() for row in np.concatenate(columns, axis=1, dtype=np.float64)]


def joined(tables: list[SeedTable]) -> SeedTable:
    return SeedTable(
        **{field.name: np.concatenate([getattr(table, field.name) for table in tables]) for field in fields(SeedTable)}
    )


def fits(table: SeedTable) -> Bools:
    return np.ones((table.environments, 1, 1), dtype=np.bool_)


def successors(states: SeedTable, rules: Rules) -> SeedTable:
    """Where every legal action leads from every one of the ``states``; each step is checked."""
    kinds = len(KINDS_OF_MEASUREMENTS.probed)
    state, kind, choice = (axis.ravel() for axis in np.indices((states.environments, kinds, len(CANDIDATES))))
    table, measurements, actions = states.rows(state), measurement_rows(KINDS_OF_MEASUREMENTS, kind), CANDIDATES[choice]
    masks = legal_actions(table, measurements, rules, fits(table))
    assert_prunable(table, masks)

    chosen = is_legal(actions, masks)
    table, measurements, actions = table.rows(chosen), measurement_rows(measurements, chosen), actions[chosen]
    before = table.copy()
    result = step(table, measurements, actions, rules, fits(table))
    assert all(np.array_equal(getattr(table, name), value) for name, value in vars(before).items()), "table mutated"
    assert_step_is_sound(table, result, actions, rules)
    assert_obeyed(table, actions, result.table)
    return result.table


@cache
def reachable(name: str) -> SeedTable:
    """One row for each state that can be reached under the named rules, found breadth first."""
    rules = RULE_SETS[name]
    frontier = SeedTable.dormant(1, 1)
    known: set[bytes] = set(identities(frontier))
    layers = [frontier]
    while frontier.environments:
        following = successors(frontier, rules)
        fresh = {identity: row for row, identity in enumerate(identities(following)) if identity not in known}
        known |= fresh.keys()
        frontier = following.rows(np.array(list(fresh.values()), dtype=np.int64))
        layers.append(frontier)
    return joined(layers)


@pytest.mark.parametrize("name", RULE_SETS)
def test_every_legal_action_from_every_reachable_state_is_sound(name: str) -> None:
    rules = RULE_SETS[name]
    states = reachable(name)
    expected = set(Stage)
    if rules.isolation == "none":
        expected.remove(Stage.TRAINING)
    if Op.FOSSILIZE not in rules.operations:
        expected.remove(Stage.FOSSILIZED)
    assert {Stage(stage) for stage in states.stage.ravel()} == expected


@pytest.mark.parametrize("name", RULE_SETS)
def test_every_live_seed_can_be_pruned_and_leaves_a_dormant_slot(name: str) -> None:
    """By the slowest ramp on offer, in as many steps as the rules say and no more."""
    rules = RULE_SETS[name]
    states = reachable(name)
    table = states.rows(states.live.ravel() & ~states.pruning.ravel())
    speed = max(rules.alpha_speeds)
    actions = np.tile(
        make_action(Op.PRUNE, alpha_speed=speed, alpha_curve=rules.alpha_curves[0]), (table.environments, 1)
    )
    measurements = good_measurements(table.environments, 1)
    at_once = (table.alpha == 0) | (speed == 0)
    # After the ramp one more step takes the seed away.
    gone = np.where(at_once, 1, speed + 1)
    for number in range(1, speed + 1 + sum(rules.cooldown) + 1):
        table = step(table, measurements, actions, rules, fits(table)).table
        actions = make_wait_actions(table.environments)
        assert np.array_equal(table.live, number < gone)
        assert np.array_equal(table.stage == Stage.DORMANT, number >= gone + sum(rules.cooldown))
    assert np.all(table.stage == Stage.DORMANT)


@pytest.mark.parametrize("name", RULE_SETS)
def test_growth_can_end_in_every_reachable_state(name: str) -> None:
    """What has weight is kept as it is or pruned, all else is pruned; fossils and empty slots are no matter."""
    rules, states = RULE_SETS[name], reachable(name)
    before = states.copy()
    weighty = states.live & (states.alpha > 0)
    for kept in (weighty, np.zeros_like(weighty)):
        pruned = states.live & ~kept
        after, changes = finish_growth(states, kept, pruned)
        assert_sound(after, rules, ended=True)
        assert not after.live.any()
        assert np.array_equal(after.stage == Stage.FOSSILIZED, kept | (states.stage == Stage.FOSSILIZED))
        assert np.array_equal(after.alpha[after.owning], states.alpha[after.owning])
        assert set(changes.cause.tolist()) <= {Cause.FINISH}
        assert changes.env.tolist() == np.flatnonzero(kept | pruned).tolist()
        others = ~(kept | pruned).ravel()
        for field in fields(SeedTable):
            assert np.array_equal(getattr(after, field.name)[others], getattr(states, field.name)[others])
        result = step(
            after, good_measurements(after.environments, 1), make_wait_actions(after.environments), rules, fits(after)
        )
        assert np.array_equal(result.table.alpha[kept], states.alpha[kept]), "time goes on, and fossils stay"
        assert_sound(result.table, rules, ended=True)
    assert all(np.array_equal(getattr(states, field.name), getattr(before, field.name)) for field in fields(SeedTable))


@pytest.mark.parametrize("name", RULE_SETS)
def test_growth_cannot_end_otherwise(name: str) -> None:
    states, one = reachable(name), np.ones((1, 1), np.bool_)
    for row in range(0, states.environments, max(states.environments // 50, 1)):
        table = states.rows(slice(row, row + 1))
        weighty = bool(table.live.all() and (table.alpha > 0).all())
        refused = [(one, one), *([] if table.live.all() else [(~one, one)]), *([] if weighty else [(one, ~one)])]
        for kept, pruned in refused:
            with pytest.raises(IllegalActionError, match="growth of network 0 cannot end with slot 0"):
                finish_growth(table, kept, pruned)
