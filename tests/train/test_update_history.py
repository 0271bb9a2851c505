"""The history of updates survives a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from esper.errors import CheckpointError
from esper.rl.diagnostics import HISTORY
from esper.train.iteration import history_from_state, history_to_state
from lab.planted import UPDATE


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def test_it_comes_back_from_json_as_it_was() -> None:
    history = (UPDATE, replace(UPDATE, kl=0.1 + 0.2, stopped_early=True, optimizer_steps=0))
    assert history_from_state(through_json(history_to_state(history))) == history


def test_so_does_what_is_no_number() -> None:
    (update,) = history_from_state(through_json(history_to_state((replace(UPDATE, value_loss=math.nan, kl=math.inf),))))
    assert math.isnan(update.value_loss)
    assert update.kl == math.inf


def test_a_state_from_before_there_was_a_history_has_none() -> None:
    assert history_from_state({}) == ()


def test_more_than_is_remembered_is_not_taken_up() -> None:
    assert len(history_from_state(history_to_state((UPDATE,) * (HISTORY + 3)))) == HISTORY


@pytest.mark.parametrize("spoil", [{"kl": "much"}, {"extra": 1.0}])
def test_what_is_no_history_is_refused(spoil: dict[str, Any]) -> None:
    (record,) = history_to_state((UPDATE,))["updates"]
    with pytest.raises(CheckpointError, match=rf"of another version \(0\.{next(iter(spoil))}: "):
        history_from_state({"updates": [{**record, **spoil}]})
