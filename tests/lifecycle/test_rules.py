"""The lifecycle's settings."""

from dataclasses import fields, replace

import numpy as np
import pytest
from pydantic import ValidationError

from esper.lifecycle.actions import (
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    TEMPOS,
    Blend,
    Curve,
    Op,
    make_action,
    make_wait_actions,
)
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.rules import GATES, Isolation, Reason, Rules, evaluate_gates
from esper.lifecycle.stages import BLENDED, COOLDOWN, LIVE, OWNING, Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from lifecycle.support import DEFAULT, RULE_SETS, good_evidence, play
from open_rules import OPEN_RULES, open_rules


def test_by_default_all_is_allowed_but_other_blends() -> None:
    rules = open_rules()
    assert rules.isolation is Isolation.NONE
    assert rules.cooldown == (1, 5, 1)
    assert rules.operations == tuple(Op)
    assert rules.blends == (Blend.ADD,)
    assert (rules.tempos, rules.alpha_targets, rules.alpha_speeds) == (TEMPOS, ALPHA_TARGETS, ALPHA_SPEEDS)
    assert rules.alpha_curves == tuple(Curve)


@pytest.mark.parametrize("name", RULE_SETS)
@pytest.mark.parametrize("mode", ["json", "python"])
def test_settings_survive_a_round_trip(name: str, mode: str) -> None:
    assert Rules.model_validate(RULE_SETS[name].model_dump(mode=mode)) == RULE_SETS[name]


def test_files_write_names() -> None:
    rules = Rules.model_validate({"operations": ["wait", "Germinate"], "blends": ["gate"], "alpha_curves": ["cosine"]})
    assert rules.operations == (Op.WAIT, Op.GERMINATE)
    dump = rules.model_dump(mode="json")
    assert (dump["operations"], dump["blends"], dump["alpha_curves"]) == (["wait", "germinate"], ["gate"], ["cosine"])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"operations": ["germinate"]}, "must contain 'wait'"),
        ({"operations": ["wait", "grow"]}, "'grow' is not one of wait, germinate"),
        ({"tempos": [4]}, "4 is not one of 3, 5, 8"),
        ({"alpha_targets": [0.6]}, "0.6 is not one of 0.5, 0.7, 1.0"),
        ({"alpha_speeds": [1]}, "1 is not one of 0, 3, 5, 8"),
        ({"alpha_curves": []}, "at least 1 item"),
        ({"cooldown": [1, 0, 1]}, "greater than or equal to 1"),
        ({"harm_tolerance": -1}, "greater than or equal to 0"),
        ({"harm_tolerance": float("nan")}, "finite number"),
        ({"embargo": 3}, "Extra inputs"),
        ({"operations": ["wait", "germinate", "set_alpha"]}, "set_alpha is never legal, because 1 is the only alpha"),
    ],
)
def test_impossible_rules_are_refused(choices: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rules.model_validate(choices)


def test_rules_are_narrowed_to_choices_that_are_known() -> None:
    assert OPEN_RULES.narrow(Rules()) == Rules()
    assert OPEN_RULES.narrow(OPEN_RULES) is OPEN_RULES
    assert Rules().narrow(OPEN_RULES) == Rules()


def test_of_a_kind_without_a_known_choice_all_stay() -> None:
    assert Rules(tempos=(5, 8)).narrow(Rules(tempos=(3,))).tempos == (5, 8)


def test_training_in_isolation_can_always_be_ended() -> None:
    alone = open_rules(isolation=Isolation.SHADOW)
    assert Op.ADVANCE in alone.narrow(Rules()).operations


# Tables and evidence as structs of arrays.


def grown() -> SeedTable:
    """Two environments with seeds in different stages."""
    one = play(SeedTable.dormant(1, 2), DEFAULT, make_action(Op.GERMINATE), make_wait_actions(1)[0]).table
    return one.rows([0, 0])


def test_stages_are_grouped() -> None:
    assert [stage.name for stage in LIVE] == ["GERMINATED", "TRAINING", "BLENDING", "HOLDING"]
    assert set(OWNING) - set(LIVE) == {Stage.FOSSILIZED}
    assert set(BLENDED) < set(OWNING)
    assert {Stage.DORMANT, *OWNING, *COOLDOWN} == set(Stage)


def test_properties_answer_by_stage() -> None:
    table = SeedTable.dormant(1, len(Stage))
    table.stage[0] = list(Stage)
    for property_values, group in ((table.live, LIVE), (table.owning, OWNING), (table.blended, BLENDED)):
        assert property_values[0].tolist() == [stage in group for stage in Stage]


def test_dormant_slots_hold_nothing() -> None:
    table = SeedTable.dormant(3, 2)
    assert (table.environments, table.slots) == (3, 2)
    assert (table.blueprint == NO_BLUEPRINT).all()
    for field in fields(SeedTable):
        values = getattr(table, field.name)
        assert values.shape == (3, 2)
        if field.name != "blueprint":
            assert not values.any()


@pytest.mark.parametrize("rows", [np.array([1]), np.array([False, True]), slice(1, 2)])
def test_rows_take_indices_masks_and_slices_and_reset_a_mask(rows: np.ndarray) -> None:
    table = grown()
    before = table.copy()
    reset = table.reset(np.array([False, True]))
    for field in fields(SeedTable):
        ours = getattr(table, field.name)
        assert np.array_equal(getattr(table.rows(rows), field.name), ours[1:])
        assert np.array_equal(getattr(reset, field.name)[0], ours[0])
        assert np.array_equal(getattr(reset, field.name)[1:], getattr(SeedTable.dormant(1, 2), field.name))
        assert np.array_equal(ours, getattr(before, field.name)), "the table itself is left as it is"
        assert getattr(reset, field.name).dtype == ours.dtype


def test_without_evidence_nothing_is_known() -> None:
    evidence = Evidence.none(2, 3)
    assert not evidence.probed.any()
    assert not evidence.gradient_healthy.any()
    assert np.isnan(evidence.contribution).all()
    assert evidence.contribution_age.shape == (2, 3)


# Each gate lets a seed pass for the right reason.


RULES = open_rules(min_training_steps=3, evidence_max_age=2, harm_tolerance=0.5)


def slot(stage: Stage, **values: float) -> SeedTable:
    """One slot in a stage, with some values set."""
    table = SeedTable.dormant(1, 1)
    table.stage[:] = stage
    for name, value in values.items():
        getattr(table, name)[:] = value
    return table


def seen(**values: float):
    """Good evidence with some values replaced."""
    evidence = good_evidence()
    arrays = {name: np.full((1, 1), value, getattr(evidence, name).dtype) for name, value in values.items()}
    return replace(evidence, **arrays)


OPEN, BAD = Reason.PASSED, {"probed": False, "gradient_healthy": False, "contribution": -1.0}
GATED = (
    (Stage.GERMINATED, {}, {}, OPEN),
    (Stage.GERMINATED, {}, BAD, Reason.NOT_PROBED),
    (Stage.TRAINING, {"stage_age": 3}, {}, OPEN),
    (Stage.TRAINING, {"stage_age": 9}, {}, OPEN),
    (Stage.TRAINING, {"stage_age": 2}, {}, Reason.TOO_YOUNG),
    (Stage.TRAINING, {"stage_age": 2}, BAD, Reason.TOO_YOUNG),
    (Stage.TRAINING, {"stage_age": 3}, BAD, Reason.GRADIENT_UNHEALTHY),
    (Stage.BLENDING, {"alpha_elapsed": 3, "alpha_duration": 3}, BAD, OPEN),
    (Stage.BLENDING, {"alpha_elapsed": 2, "alpha_duration": 3}, {}, Reason.ALPHA_MOVING),
    (Stage.HOLDING, {}, {"contribution": 0.0}, OPEN),
    (Stage.HOLDING, {}, {"contribution": -0.5, "contribution_age": 2}, OPEN),
    (Stage.HOLDING, {}, {"contribution": -0.51}, Reason.HARMFUL),
    (Stage.HOLDING, {}, {"contribution": 1.0, "contribution_age": 3}, Reason.STALE),
    (Stage.HOLDING, {}, {"contribution": -1.0, "contribution_age": 3}, Reason.STALE),
    (Stage.HOLDING, {}, {"contribution": np.nan}, Reason.NOT_MEASURED),
    (Stage.HOLDING, {}, {"contribution": np.nan, "contribution_age": 9}, Reason.NOT_MEASURED),
    *((stage, {"stage_age": 9}, {}, Reason.NO_GATE) for stage in Stage if stage not in GATES),
)
"""A stage, values of its slot, what is measured of it, and what its gate says."""


@pytest.mark.parametrize(("stage", "values", "evidence", "reason"), GATED)
def test_a_gate_gives_its_reason(
    stage: Stage, values: dict[str, float], evidence: dict[str, float], reason: Reason
) -> None:
    found = evaluate_gates(slot(stage, **values), seen(**evidence), RULES)
    assert (found.reason[0, 0], found.passed[0, 0]) == (reason, reason == Reason.PASSED)


@pytest.mark.parametrize(("elapsed", "legal"), [(3, True), (2, False)])
def test_a_held_seed_whose_alpha_moves_is_not_fossilized(elapsed: int, legal: bool) -> None:
    table = slot(Stage.HOLDING, alpha_elapsed=elapsed, alpha_duration=3)
    masks = legal_actions(table, good_evidence(), RULES, np.ones((1, 1, 1), np.bool_))
    assert masks.slot[0, Op.FOSSILIZE, 0] == legal
