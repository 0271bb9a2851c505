"""Minibatches and evaluation batches of the practitioners' tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from esper.errors import TaskError
from esper.tasks.data import Scale
from esper.tasks.practice.examples import Labelled, Windows


def labelled(count: int) -> Labelled:
    """Example i is the number i, labelled i."""
    numbers = torch.arange(count)
    return Labelled(numbers[:, None].to(torch.uint8), numbers, Scale(3.0, 2.0))


def windows(count: int, length: int) -> Windows:
    return Windows(np.arange(count, dtype=np.uint16), length)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(count=st.integers(1, 40), size=st.integers(1, 50))
def test_an_epoch_shows_no_example_twice_and_only_whole_minibatches(count: int, size: int) -> None:
    batches = list(labelled(count).epoch(size, rng()))
    seen = torch.cat([batch.targets for batch in batches])
    assert len(set(seen.tolist())) == len(seen)
    assert len(seen) == (count // size * size or count)
    assert {len(batch.targets) for batch in batches} == {min(size, count)}


@given(count=st.integers(1, 40), size=st.integers(1, 50))
def test_in_order_shows_every_example_once(count: int, size: int) -> None:
    seen = torch.cat([batch.targets for batch in labelled(count).in_order(size)])
    assert seen.tolist() == list(range(count))


def test_inputs_are_standardised_and_stay_with_their_labels() -> None:
    for batch in labelled(12).epoch(4, rng()):
        assert batch.inputs.dtype is torch.float32
        assert torch.equal(batch.inputs[:, 0], (batch.targets - 3.0) / 2.0)


def test_the_order_follows_from_the_generator() -> None:
    def order(seed: int) -> list[int]:
        return torch.cat([batch.targets for batch in labelled(20).epoch(5, rng(seed))]).tolist()

    assert order(1) == order(1) != order(2)


@given(count=st.integers(3, 60), length=st.integers(1, 20), size=st.integers(1, 8))
def test_targets_are_the_next_tokens(count: int, length: int, size: int) -> None:
    assume(count > length)
    part = windows(count, length)
    batches = [*part.epoch(size, rng()), *part.in_order(size)]
    assert batches
    for batch in batches:
        assert batch.inputs.shape == batch.targets.shape
        assert batch.inputs.shape[1] == length
        assert torch.equal(batch.targets, batch.inputs + 1)
        assert int(batch.targets.max()) < count


def test_windows_in_order_do_not_overlap() -> None:
    seen = torch.cat([batch.inputs.flatten() for batch in windows(31, 5).in_order(2)])
    assert seen.tolist() == list(range(30))


def test_windows_begin_anywhere() -> None:
    starts = {int(start) for batch in windows(50, 8).epoch(2, rng()) for start in batch.inputs[:, 0]}
    assert any(start % 8 for start in starts)


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(TaskError, match="5 characters.*longer text"):
        windows(5, 5)
