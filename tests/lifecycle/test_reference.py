"""The vectorised lifecycle against the plain one in `reference`."""

import math
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from esper.lifecycle.actions import Head, Op
from esper.lifecycle.legality import ActionMasks, is_legal, legal_actions
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import step
from esper.numerics.arrays import Ints
from lifecycle import reference
from lifecycle.support import RULE_SETS, every_action, evidence_rows, random_compatibility, random_evidence, sample


def measured(evidence: Evidence) -> list[list[reference.Measured]]:
    columns = [getattr(evidence, field.name).tolist() for field in fields(reference.Measured)]
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


def assert_tables_agree(table: SeedTable, expected: SeedTable) -> None:
    for field in fields(SeedTable):
        ours, theirs = getattr(table, field.name), getattr(expected, field.name)
        assert ours.dtype == theirs.dtype, field.name
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6, err_msg=field.name)


@pytest.mark.parametrize("name", RULE_SETS)
@pytest.mark.few(4)
def test_tables_verdicts_and_transitions_agree(name: str) -> None:
    """Long random legal sequences with random evidence."""
    environments, slots, blueprints, steps = 16, 3, 4, 200
    rules, generator = RULE_SETS[name], np.random.default_rng(len(name))
    compatible = random_compatibility(environments, slots, blueprints, generator)
    table = SeedTable.dormant(environments, slots)
    population = [[reference.Slot() for _ in range(slots)] for _ in range(environments)]
    seen: Counter[tuple[Stage, Stage]] = Counter()
    for _ in range(steps):
        evidence = random_evidence(environments, slots, generator)
        actions = sample(legal_actions(table, evidence, rules, compatible), generator)
        result = step(table, evidence, actions, rules, compatible)
        facts = measured(evidence)
        reasons = [
            [reference.gate_ahead(slot, fact, rules) for slot, fact in zip(*pair, strict=True)]
            for pair in zip(population, facts, strict=True)
        ]
        for environment, row, chosen in zip(population, facts, actions.tolist(), strict=True):
            reference.step(environment, row, chosen, rules)

        table, changes = result.table, result.transitions
        assert_tables_agree(table, as_table(population))
        np.testing.assert_array_equal(result.verdicts.reason, reasons)
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
        evidence = random_evidence(environments, slots, generator)
        facts = measured(evidence)
        for number, environment in enumerate(population):
            allowed = [
                reference.is_legal(environment, facts[number], row, rules, fits[number]) for row in candidates.tolist()
            ]
            copies = np.full(len(candidates), number)
            masks = legal_actions(table.rows(copies), evidence_rows(evidence, copies), rules, compatible[copies])
            assert is_legal(candidates, masks).tolist() == allowed
            assert_masks_are_exact(masks, candidates[allowed])
        actions = sample(legal_actions(table, evidence, rules, compatible), generator)
        table = step(table, evidence, actions, rules, compatible).table
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
