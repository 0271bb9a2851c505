"""Watching a sweep: a row per trial, whoever has worked at it before."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from esper.lab.sweep import RankedTrial, SweepTrial, TrialProgress, load_space
from esper.lab.sweep_view import SweepView
from lab.planted import iteration

TOTAL = 8


@pytest.fixture
def trials(tmp_path: Path) -> list[SweepTrial]:
    file = tmp_path / "space.yaml"
    file.write_text(f"base: {{iterations: {TOTAL}}}\ngrid: {{seed: [0, 1]}}")
    return load_space(file).trials(None, 0)


def rows(view: SweepView) -> list[list[str]]:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(view.table())
    return [line.split() for line in console.export_text().splitlines()][1:]


def test_a_trial_that_goes_on_counts_what_was_done_before_and_tells_only_of_its_own(trials: list[SweepTrial]):
    output = io.StringIO()
    view = SweepView(Console(file=output, width=100), trials)
    for done in range(1, 5):
        view.hear(TrialProgress(0, done, None))
    assert rows(view) == [
        ["trial-000", f"4/{TOTAL}", "waiting", "seed=0"],
        ["trial-001", f"0/{TOTAL}", "waiting", "seed=1"],
    ]
    assert output.getvalue() == ""
    for done in (5, 6):
        view.hear(TrialProgress(0, done, iteration(done, TOTAL, objective=0.5)))
    trial, done, objective, left, _ = rows(view)[0]
    assert (trial, done, objective) == ("trial-000", f"6/{TOTAL}", "0.500")
    assert left != "waiting"
    assert output.getvalue().startswith(f"trial-000: iteration 6/{TOTAL}, J 0.500, ")  # every quarter gets a line
    view.conclude(1, RankedTrial("trial-001", {"seed": 1}, 0.25, 0.3, 0.1))
    assert rows(view)[1] == ["trial-001", f"{TOTAL}/{TOTAL}", "0.250", "done", "seed=1"]
