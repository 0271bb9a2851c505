"""The benchmark counts what arrived and what it cost, and says so as its contract tells."""

from __future__ import annotations

import json
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest

from esper.cli import main
from esper.experiments.bench_telemetry import AT_ONCE, follow, measure_share, step_events
from esper.telemetry.store import RunStore, as_rows
from experiments.runs import tiny
from experiments.short_suite import short_suite


def judged(path: Path, starts: list[int], expected: int) -> str | None:
    """What the follower says of a store with these events in it."""
    ours, theirs = Pipe()
    with RunStore.create(path) as store:
        for first in starts:
            store.append(as_rows(step_events(first)))
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


def test_the_share_is_that_of_the_events_that_training_told() -> None:
    with short_suite():
        full = measure_share(tiny("iterations=1"))
        assert full.events_per_step > 1
        assert 0 < full.share < 1
        assert 0 < full.committing < full.microseconds
        assert full.shares == [full.share]


@pytest.mark.slow
def test_the_last_line_is_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "telemetry", "--seconds", "0.2", "--iterations", "1", "--environments", "8", "--json"]
    assert main(words) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(record)[:2] == ["events_per_second", "cpu_share"]
    assert record["events_per_second"] == record["rate"]["followed"] > 0
    assert record["cpu_share"] == record["training"]["share"]


@pytest.mark.parametrize("option", [("--seconds", "0"), ("--iterations", "0"), ("--environments", "9")])
def test_what_cannot_be_measured_is_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "telemetry", *option]) == 2
    assert capsys.readouterr().err.startswith("error: ")
