"""The record of what is promised: when it is taken, how old it is, and what of it controllers see."""

import json
from typing import Literal

import numpy as np
import pytest

from esper.errors import CheckpointError
from esper.growth.promise import PromiseRecord, PromiseSettings

E, S, K = 3, 2, 4
EVERYONE = np.ones(E, np.bool_)
FIRST = np.array([True, False, False])


def record(shown: Literal["both", "fitted", "held_out"] = "both") -> PromiseRecord:
    return PromiseRecord(E, S, K, PromiseSettings(shown=shown))


def figures(seed: int) -> tuple[np.ndarray, np.ndarray]:
    fitted, held_out = np.random.default_rng(seed).random((2, E, S, K))
    return fitted, held_out - 0.5


def test_it_is_due_every_so_many_decisions_of_each_network() -> None:
    settings = PromiseSettings(first=2, every=3)
    assert [one for one in range(12) if settings.is_due(np.array([one]))[0]] == [2, 5, 8, 11]


def test_ages_count_the_decisions_of_those_who_took_them() -> None:
    kept = record()
    assert np.isinf(kept.age).all()
    kept.record(EVERYONE, *figures(0))
    kept.advance_age(EVERYONE)
    kept.advance_age(FIRST)
    assert kept.age.tolist() == [2, 1, 1]
    kept.record(FIRST, *figures(1))
    assert kept.age.tolist() == [0, 1, 1]


def test_only_those_who_are_measured_get_new_figures() -> None:
    kept, (old, new) = record(), (figures(0), figures(1))
    kept.record(EVERYONE, *old)
    kept.record(FIRST, *new)
    np.testing.assert_array_equal(kept.fitted, np.concatenate([new[0][:1], old[0][1:]]))
    np.testing.assert_array_equal(kept.held_out, np.concatenate([new[1][:1], old[1][1:]]))


def test_the_change_is_that_of_the_best_from_one_measurement_to_the_next() -> None:
    kept, (old, new) = record(), (figures(0), figures(1))
    kept.record(EVERYONE, *old)
    assert not kept.change.any()
    kept.record(FIRST, *new)
    assert kept.change.tolist() == pytest.approx([new[1][0].max() - old[1][0].max(), 0, 0])
    kept.restart(FIRST)
    assert np.isnan(kept.fitted[0]).all()
    assert np.isinf(kept.age[0])
    assert not kept.change.any()
    assert np.isfinite(kept.fitted[1:]).all()


@pytest.mark.parametrize("shown", ["fitted", "held_out"])
def test_what_is_not_shown_is_zero_where_something_was_measured(shown: Literal["fitted", "held_out"]) -> None:
    kept, (fitted, held_out) = record(shown), figures(0)
    fitted[0, 0, 0] = held_out[0, 0, 0] = np.nan
    kept.record(EVERYONE, fitted, held_out)
    seen, hidden = (kept.fitted, kept.held_out) if shown == "fitted" else (kept.held_out, kept.fitted)
    np.testing.assert_array_equal(seen, fitted if shown == "fitted" else held_out)
    assert np.isnan(hidden[0, 0, 0])
    assert not np.nan_to_num(hidden).any()
    assert kept.best.tolist() == np.nanmax(seen, (1, 2)).tolist()


def test_it_goes_on_where_it_was_saved() -> None:
    kept, other = record(), record()
    kept.record(FIRST, *figures(0))
    kept.advance_age(EVERYONE)
    other.load_state_dict(kept.state_dict())
    other.record(EVERYONE, *figures(1))
    kept.record(EVERYONE, *figures(1))
    for name in ("fitted", "held_out", "age", "change"):
        np.testing.assert_array_equal(getattr(other, name), getattr(kept, name))
    with pytest.raises(CheckpointError):
        PromiseRecord(E, S + 1, K, PromiseSettings()).load_state_dict(kept.state_dict())
    assert json.dumps(sorted(kept.state_dict())) == json.dumps(["age", "change", "fitted", "held_out"])
