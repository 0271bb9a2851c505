"""Networks that blow up while a controller is learned: training goes on, and the run records them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper.runs.events import RolledBack
from esper.runs.reader import RunReader
from esper.tasks import registry
from esper.tasks.instance import Instance
from esper.train.collect import sample_instances
from train.runs import ignore, started, tiny
from train.short_suite import ShortSuite

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
