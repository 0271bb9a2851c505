"""The benchmark of training counts decisions, and shares out the time that it saw."""

from __future__ import annotations

import cProfile
import json
import time

import pytest

from esper.cli import main
from esper.lab import bench_train as benchmark
from esper.lab.bench_train import PARTS, REST, bench_train, measure_shares
from train.runs import TINY, tiny
from train.short_suite import short_suite

pytestmark = pytest.mark.landing


def spend(seconds: float) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        pass


def one() -> None:
    spend(0.03)


def other() -> None:
    spend(0.01)
    one()


def test_time_is_shared_out_by_function(monkeypatch: pytest.MonkeyPatch):
    parts = {"hosts and seeds": (other,), "optimizers": (one,), "absent": (json.dumps,)}
    monkeypatch.setattr(benchmark, "PARTS", parts)
    profile = cProfile.Profile()
    profile.runcall(other)
    found = measure_shares(profile)
    assert sum(found.values()) == pytest.approx(1)
    assert found["optimizers"] > found["hosts and seeds"] > found["absent"] == 0
    assert found[REST] == pytest.approx(0, abs=0.2)


def test_every_part_takes_time_in_a_real_training():
    numbers: list[int] = []
    with short_suite():
        found = bench_train(
            tiny("iterations=2", "policy.advice.rule.promise={first: 1, examples: 8}"),
            lambda number, speed: numbers.append(number),
        )
    assert numbers == [1, 2]
    assert found.env_steps_per_second == found.iterations[1] > 0, "the first one warms up"
    assert found.share.keys() == {*PARTS, REST}
    assert all(share > 0 for share in found.share.values())
    assert sum(found.share.values()) == pytest.approx(1)
    assert sum(found.operations.values()) == pytest.approx(found.operations_per_decision)
    assert {"bmm", "addcdiv_"} < found.operations.keys()


def test_the_command_ends_with_json(capsys: pytest.CaptureFixture[str]):
    words = [word for setting in TINY for word in ("--set", setting)]
    with short_suite():
        assert main(["bench", "train", "--iterations", "1", "--json", *words]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["env_steps_per_second"] > 0
    assert last["share"].keys() == {*PARTS, REST}
    assert last["operations_per_decision"] == pytest.approx(sum(last["operations"].values()))
