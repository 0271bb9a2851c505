"""The lifecycle's settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, Blend, Curve, Op
from esper.lifecycle.rules import Isolation, Rules
from lifecycle.support import RULE_SETS
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
