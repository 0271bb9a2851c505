"""The benchmark of training counts decisions, and shares out the time that it saw."""

from __future__ import annotations

import cProfile
import json
import time
from collections.abc import Callable

import pytest
import torch

from esper.cli import main
from esper.experiments import bench_operations
from esper.experiments import bench_train as benchmark
from esper.experiments.bench_train import PARTS, REST, bench_train, shares
from experiments.runs import TINY, tiny
from experiments.short_suite import short_suite


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
    found = shares(profile)
    assert sum(found.values()) == pytest.approx(1)
    assert found["optimizers"] > found["hosts and seeds"] > found["absent"] == 0
    assert found[REST] == pytest.approx(0, abs=0.2)


def test_every_part_takes_time_in_a_real_training():
    heard: list[int] = []
    with short_suite():
        found = bench_train(tiny("iterations=2"), lambda number, speed: heard.append(number))
    assert heard == [1, 2]
    assert found.env_steps_per_second == found.iterations[1] > 0, "the first one warms up"
    assert found.share.keys() == {*PARTS, REST}
    assert all(share > 0 for share in found.share.values())
    assert sum(found.share.values()) == pytest.approx(1)


def test_the_command_ends_with_json(capsys: pytest.CaptureFixture[str]):
    words = [word for setting in TINY for word in ("--set", setting)]
    with short_suite():
        assert main(["bench", "train", "--iterations", "1", "--json", *words]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["env_steps_per_second"] > 0
    assert last["share"].keys() == {*PARTS, REST}


def test_the_profile_tells_operations_and_what_bounds_them(capsys: pytest.CaptureFixture[str]):
    words = [word for setting in TINY for word in ("--set", setting)]
    with short_suite():
        assert main(["bench", "train", "--iterations", "1", "--profile", "--json", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(printed[-1])["operations"]
    shares_found = [one["share"] for one in found["operations"]]
    assert shares_found == sorted(shares_found, reverse=True)
    assert 0 < sum(shares_found) <= 1
    assert all(one["calls"] > 0 and one["milliseconds"] > 0 for one in found["operations"])
    assert found["flops_per_env_step"] * found["arithmetic_env_steps_per_second"] == pytest.approx(
        found["flops_per_second"]
    )


def _told(work: Callable[[], float | torch.Tensor]) -> float:
    """Seconds as the work tells them; a millisecond for a product of matrices."""
    result = work()
    return 0.001 if isinstance(result, torch.Tensor) else result


def test_time_is_split_into_what_networks_add_and_the_rest(monkeypatch: pytest.MonkeyPatch):
    """A decision that takes 30 ms and 2 ms for each network, told exactly."""

    class Player:
        def __init__(self, _settings: object, size: int) -> None:
            self.size = size

        def decide(self) -> float:
            torch.mm(torch.ones(self.size, 3), torch.ones(3, 5))
            return 0.03 + 0.002 * self.size

    monkeypatch.setattr(bench_operations, "_Player", Player)
    monkeypatch.setattr(bench_operations, "_timed", _told)
    found = bench_operations.profile_operations(tiny("environments=64"))
    assert found.fixed_milliseconds == pytest.approx(30)
    assert found.milliseconds_per_network == pytest.approx(2)
    assert found.most_env_steps_per_second == pytest.approx(500)
    assert found.flops_per_env_step == 2 * 3 * 5
    assert found.flops_per_second == 2 * 512**3 / 0.001
