"""What follows an anomaly of an update: its record, minibatches in full, and what the settings say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esper.errors import DivergedError
from esper.rl.diagnostics import SKIPPED_RATE
from esper.runs.events import AnomalyRaised, MinibatchRecorded, PPOUpdated
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.train.iteration import Iteration
from train.runs import ignore, resumed, started, tiny
from train.short_suite import short_suite

pytestmark = pytest.mark.landing

MOVES_TOO_FAR = "ppo.target_kl=1e-9"
"""With such a target every step is far too long."""


@pytest.fixture(autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


def train(path: Path, *overrides: str) -> list[Iteration]:
    iterations: list[Iteration] = []
    with started(path, tiny(*overrides)) as trainer:
        trainer.train(iterations.append)
    return iterations


@pytest.mark.parametrize("after", [0, 1])
def test_minibatches_are_recorded_in_the_iterations_after_an_anomaly(tmp_path: Path, after: int) -> None:
    train(tmp_path / "run", MOVES_TOO_FAR, f"telemetry.minibatches_after_anomaly={after}", "iterations=3")
    with RunReader.open(RunDirectory.open(tmp_path / "run").store) as reader:
        alarms = reader.events(AnomalyRaised)
        assert {(alarm.iteration, alarm.anomaly, alarm.head, alarm.response) for alarm in alarms} >= {
            (number, "kl", None, "record") for number in (1, 2, 3)
        }
        assert all(alarm.value > alarm.bound for alarm in alarms if alarm.anomaly == "kl")
        assert all("kl" in update.anomalies for update in reader.events(PPOUpdated))
        minibatches = reader.events(MinibatchRecorded)
        assert {one.iteration for one in minibatches} == ({2, 3} if after else set())
        for one in minibatches:
            assert one.figures.keys() >= {"kl", "head_ratio/slot", "head_entropy/op", "head_advantage/blueprint"}
        rows = reader.rows("SELECT DISTINCT figure FROM minibatches WHERE minibatch = 0 AND figure LIKE 'head_ratio/%'")
        assert len(rows) == (3 if after else 0)  # the heads for which default rules leave a choice


def test_a_healthy_run_records_no_minibatches(tmp_path: Path) -> None:
    iterations = train(tmp_path / "run", "ppo.target_kl=1000", "ppo.learning_rate=1e-6", "iterations=2")
    assert [iteration.minibatches for iteration in iterations] == [(), ()]


def test_an_update_that_did_harm_is_undone_and_the_rate_halved(tmp_path: Path) -> None:
    overrides = (MOVES_TOO_FAR, "ppo.on_anomaly=skip", "iterations=2")
    with started(tmp_path / "run", tiny(*overrides)) as trainer:
        before = trainer.learner.state_tensors()
        rates: list[tuple[float, bool]] = []
        trainer.train(lambda done: rates.append((done.update["rate_scale"], done.update["skipped"])))
        after = trainer.learner.state_tensors()
    assert rates == [(1.0, True), (SKIPPED_RATE, True)]
    assert all(torch.equal(before[name], after[name]) for name in before)
    with RunReader.open(RunDirectory.open(tmp_path / "run").store) as reader:
        assert {one.response for one in reader.events(AnomalyRaised)} == {"skip"}


def test_the_rate_stays_halved_when_a_run_is_resumed(tmp_path: Path) -> None:
    rates: list[float] = []

    def note(iteration: Iteration) -> None:
        rates.append(iteration.update["rate_scale"])
        if iteration.number == 1 and len(rates) == 1:
            raise KeyboardInterrupt

    settings = tiny(MOVES_TOO_FAR, "ppo.on_anomaly=skip", "iterations=2")
    with started(tmp_path / "run", settings) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train(note)
    with resumed(tmp_path / "run") as trainer:
        trainer.train(note)
    assert rates == [1.0, SKIPPED_RATE]


def test_anomalies_that_are_no_harm_of_the_update_undo_nothing(tmp_path: Path) -> None:
    # The value function of an untrained policy cannot foresee anything: a state, not a harm.
    overrides = ("ppo.target_kl=1000", "ppo.on_anomaly=skip", "ppo.learning_rate=1e-6", "iterations=1")
    (iteration,) = train(tmp_path / "run", *overrides)
    assert not any(alarm.anomaly.harms for alarm in iteration.anomalies)
    assert not iteration.update["skipped"]
    assert iteration.response == "record"


def test_a_run_that_stops_at_anomalies_is_saved_and_can_be_resumed(tmp_path: Path) -> None:
    settings = tiny(MOVES_TOO_FAR, "ppo.on_anomaly=stop", "iterations=2")
    sentence = r"iteration 1 had an anomaly: kl: .* \(kl is .*, the bound 5e-09\).*--resume"
    with started(tmp_path / "run", settings) as trainer, pytest.raises(DivergedError, match=sentence):
        trainer.train(ignore)
    with resumed(tmp_path / "run") as trainer:
        assert trainer.done == 1
        with pytest.raises(DivergedError, match="iteration 2 had an anomaly"):
            trainer.train(ignore)
    with RunReader.open(RunDirectory.open(tmp_path / "run").store) as reader:
        assert {one.response for one in reader.events(AnomalyRaised)} == {"stop"}
        assert all(math.isfinite(one.value) for one in reader.events(AnomalyRaised))
