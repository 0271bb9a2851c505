"""The history of updates survives a checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from esper.errors import CheckpointError
from esper.rl.diagnostics import HISTORY
from esper.train.iteration import history_from_state, history_to_state
from lab.planted import UPDATE


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def test_it_comes_back_from_json_as_it_was() -> None:
    history = (UPDATE, {**UPDATE, "kl": 0.1 + 0.2, "optimizer_steps": 0.0})
    assert history_from_state(through_json(history_to_state(history))) == history


def test_so_does_what_is_no_number() -> None:
    unbounded = {**UPDATE, "value_loss": math.nan, "kl": math.inf}
    (update,) = history_from_state(through_json(history_to_state((unbounded,))))
    assert math.isnan(update["value_loss"])
    assert update["kl"] == math.inf


def test_more_than_is_remembered_is_not_taken_up() -> None:
    assert len(history_from_state(history_to_state((UPDATE,) * (HISTORY + 3)))) == HISTORY


@pytest.mark.parametrize("spoilt", [{**UPDATE, "kl": "much"}, {**UPDATE, "extra": 1.0}, {"kl": 0.1}, 3, None])
def test_what_is_no_history_is_refused(spoilt: Any) -> None:
    with pytest.raises(CheckpointError, match="figures of updates are of another version"):
        history_from_state({"updates": [spoilt]})


def test_a_state_without_a_history_is_refused() -> None:
    with pytest.raises(CheckpointError, match="figures of updates are of another version"):
        history_from_state({})
