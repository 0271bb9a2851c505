"""The benchmark counts what arrived and what it cost, and says so as its contract tells."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest

from benchmarks.telemetry import AT_ONCE, follow, measure_rate, measure_training, step_events
from esper.runs.store import RunStore, encode_events
from train.runs import tiny
from train.short_suite import short_suite

pytestmark = pytest.mark.landing


def judged(path: Path, starts: list[int], expected: int) -> str | None:
    """What the follower says of a store with these events in it."""
    ours, theirs = Pipe()
    with RunStore.create(path) as store:
        for first in starts:
            store.append(encode_events(step_events(first)))
        store.flush()
        ours.send(expected)
        thread = threading.Thread(target=follow, args=(path, theirs))
        thread.start()
        assert ours.recv() == "ready"
        fault = ours.recv()
        thread.join()
    return fault


@pytest.mark.parametrize(
    ("starts", "expected", "fault"),
    [
        ([0, AT_ONCE], 2 * AT_ONCE, None),
        ([0, AT_ONCE, 2 * AT_ONCE], 2 * AT_ONCE, f"{3 * AT_ONCE} events came of {2 * AT_ONCE}"),
        ([0, 2 * AT_ONCE], 3 * AT_ONCE, f"instead of event {AT_ONCE} came StepTaken"),
        ([AT_ONCE, 0], 2 * AT_ONCE, "instead of event 0 came StepTaken"),
    ],
)
def test_a_follower_notices_what_is_missing_or_out_of_order(
    tmp_path: Path, starts: list[int], expected: int, fault: str | None
) -> None:
    found = judged(tmp_path / "run.db", starts, expected)
    assert (found or "").startswith(fault or "")
    assert (found is None) == (fault is None)


def test_both_rates_are_those_of_the_same_events() -> None:
    written, followed = measure_rate(0.1)
    assert written > followed > 0


def test_the_share_is_that_of_the_events_that_training_told() -> None:
    with short_suite():
        (lap,) = measure_training(tiny("iterations=1"))
    assert lap.events > lap.steps > 0
    assert 0 < lap.telemetry < lap.total
