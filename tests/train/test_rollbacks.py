"""Networks that blow up while a controller is learned: training goes on, and the run records them."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.errors import CheckpointError, DivergedError
from esper.runs.events import AnomalyRaised, MinibatchRecorded, PPOUpdated, RolledBack
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.tasks import registry
from esper.tasks.instance import Instance
from esper.train.iteration import SKIPPED_RATE, Iteration, history_from_state, history_to_state
from esper.train.settings import HISTORY
from esper.train.trainer import sample_instances
from lab.planted import UPDATE
from train.runs import ShortSuite, ignore, resumed, started, tiny

ILL = "vote"


class WildSuite(ShortSuite):
    """One family is trained with a learning rate that nothing survives."""

    name = "wild"

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        drawn = super().draw(family, variant, seed, rng)
        return replace(drawn, learning_rate=1e30) if family == ILL else drawn


@pytest.fixture(autouse=True)
def _wild_suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry._suites, WildSuite.name, WildSuite)
    return


@pytest.mark.landing
def test_training_survives_networks_that_blow_up_and_tells_of_each(tmp_path: Path) -> None:
    settings = tiny("suite=wild", "iterations=1", "environments=32", "ppo.group=4")
    with started(tmp_path / "run", settings) as trainer:
        trainer.train(ignore)
    ill = [number for number, one in enumerate(sample_instances(settings, 0, 0)) if one.family == ILL]
    assert ill, "the test means to have some"
    with RunReader.open(tmp_path / "run" / "run.db") as reader:
        events = reader.events(RolledBack)
        assert {event.environment for event in events} >= set(ill)
        assert sorted(event.environment for event in events if event.ended) == ill
        assert {event.trouble for event in events if event.environment in ill} <= {"not_finite", "exploded"}
        assert reader.series("rollbacks") == [(1, len(events))]
        ((_, steps),) = reader.series("environment_steps")
        assert 32 < steps < 32 * ShortSuite.steps, "ended episodes take no steps"
        assert all(np.isfinite(value) for _, value in reader.series("objective"))


# The history of updates survives a checkpoint.


def test_it_comes_back_from_json_as_it_was() -> None:
    history = (UPDATE, {**UPDATE, "kl": 0.1 + 0.2, "optimizer_steps": 0.0}, {**UPDATE, "kl": math.inf})
    *found, last = history_from_state(json.loads(json.dumps(history_to_state((*history, {**UPDATE, "kl": math.nan})))))
    assert found == [*history]
    assert math.isnan(last["kl"])


def test_more_than_is_remembered_is_not_taken_up() -> None:
    assert len(history_from_state(history_to_state((UPDATE,) * (HISTORY + 3)))) == HISTORY


@pytest.mark.parametrize("spoilt", [{**UPDATE, "kl": "much"}, {**UPDATE, "extra": 1.0}, {"kl": 0.1}, 3, None])
def test_what_is_no_history_is_refused(spoilt: Any) -> None:
    for state in ({"updates": [spoilt]}, {}):
        with pytest.raises(CheckpointError, match="figures of updates are of another version"):
            history_from_state(state)


# What follows an anomaly of an update: its record, minibatches in full, and what the settings say.


MOVES_TOO_FAR = "ppo.target_kl=1e-9"
"""With such a target every step is far too long."""


def train(path: Path, *overrides: str) -> list[Iteration]:
    iterations: list[Iteration] = []
    with started(path, tiny(*overrides)) as trainer:
        trainer.train(iterations.append)
    return iterations


@pytest.mark.landing
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


@pytest.mark.landing
def test_an_update_that_did_harm_is_undone_and_the_rate_halved(tmp_path: Path) -> None:
    overrides = (MOVES_TOO_FAR, "ppo.on_anomaly=skip", "iterations=2")
    with started(tmp_path / "run", tiny(*overrides)) as trainer:
        before = trainer.learner.state_tensors()
        rates: list[tuple[float, bool]] = []
        trainer.train(lambda done: rates.append((done.figures["ppo/rate_scale"], done.figures["ppo/skipped"])))
        after = trainer.learner.state_tensors()
    assert rates == [(1.0, True), (SKIPPED_RATE, True)]
    assert all(torch.equal(before[name], after[name]) for name in before)
    with RunReader.open(RunDirectory.open(tmp_path / "run").store) as reader:
        assert {one.response for one in reader.events(AnomalyRaised)} == {"skip"}


@pytest.mark.landing
def test_the_rate_stays_halved_when_a_run_is_resumed(tmp_path: Path) -> None:
    rates: list[float] = []

    def note(iteration: Iteration) -> None:
        rates.append(iteration.figures["ppo/rate_scale"])
        if iteration.number == 1 and len(rates) == 1:
            raise KeyboardInterrupt

    settings = tiny(MOVES_TOO_FAR, "ppo.on_anomaly=skip", "iterations=2")
    with started(tmp_path / "run", settings) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train(note)
    with resumed(tmp_path / "run") as trainer:
        trainer.train(note)
    assert rates == [1.0, SKIPPED_RATE]


@pytest.mark.landing
def test_anomalies_that_are_no_harm_of_the_update_undo_nothing(tmp_path: Path) -> None:
    # The value function of an untrained policy cannot foresee anything: a state, not a harm.
    overrides = ("ppo.target_kl=1000", "ppo.on_anomaly=skip", "ppo.learning_rate=1e-6", "iterations=1")
    (iteration,) = train(tmp_path / "run", *overrides)
    assert not any(alarm.anomaly.harms for alarm in iteration.anomalies)
    assert not iteration.figures["ppo/skipped"]
    assert iteration.response == "record"


@pytest.mark.landing
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
