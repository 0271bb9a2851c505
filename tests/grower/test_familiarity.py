"""A learned policy says at once what it never met where it learned."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.tasks.registry import get_suite
from esper.tasks.token_suite import RENT
from grower.training_loop import growing, validate
from train.runs import create_untrained_run

SUITE = get_suite("tokens")
KNOWN: dict[str, Any] = {"classes": SUITE.classes, "rent": RENT, "horizon": SUITE.steps}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run of a policy that has learned nothing yet, on the default suite."""
    return create_untrained_run(tmp_path_factory.mktemp("familiarity") / "run")


def said(controller: str, model: esper.GrowingModel, **circumstances: Any) -> list[str]:
    """What a grower warns of when it is made."""
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        esper.Grower(model, optimizer, controller=controller, evaluate=validate, **circumstances)
    assert all(one.filename == __file__ for one in found), "warnings point to who made the grower"
    return [str(one.message) for one in found]


def familiar(*, blueprint: str = "mlp") -> esper.GrowingModel:
    return esper.attach(
        nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)), {"0": [blueprint]}, torch.zeros(2, *SUITE.input_shape)
    )


def test_what_it_knows_needs_no_word(trained: str):
    assert said(trained, familiar(), **KNOWN) == []


@pytest.mark.parametrize(
    ("circumstances", "word"),
    [
        ({"classes": 7}, r"no 7 classes \(only 4\)\."),
        ({"rent": 0.0}, r"no rent 0 \(only 0.08\)\."),
        ({"rent": 0.5}, r"no rent 0.5 \(only 0.08\)\."),
        ({"horizon": 50}, r"no horizon 50 \(only 30\)\."),
        ({"horizon": None}, r"no horizon 100 \(only 30\)\."),
    ],
)
def test_foreign_circumstances_are_named(trained: str, circumstances: dict[str, Any], word: str):
    (warning,) = said(trained, familiar(), **{**KNOWN, **circumstances})
    assert_says(warning, word)


def test_foreign_blueprints_and_layouts_are_named(trained: str):
    (warning,) = said(trained, familiar(blueprint="lowrank_8"), **KNOWN)
    assert_says(warning, r"no blueprints lowrank_8 \(only mlp, ")
    host = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
    (warning,) = said(trained, esper.attach(host, {"0": ["mlp"]}, torch.zeros(2, 5)), **KNOWN)
    assert_says(warning, r"no layouts features \(only tokens\)\.")


def test_all_of_it_is_one_warning_and_rules_need_none(trained: str):
    (warning,) = said(trained, growing(), classes=3)
    assert_says(
        warning, r"no blueprints lowrank .*; no layouts features .*; no horizon 100 .*; no rent 0 .*; no 3 classes"
    )
    assert "It may plant and prune without keeping anything" in warning
    assert said("heuristic", growing(), classes=3) == []


def assert_says(warning: str, pattern: str) -> None:
    assert re.search(pattern, warning), warning
