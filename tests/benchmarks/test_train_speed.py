"""The benchmark of training counts decisions, and shares out the time that it saw."""

import cProfile
import json
import sys
import time
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import train_speed
from benchmarks.train_speed import PARTS, REST, ProfiledEvent, count_operations, measure_shares, measure_training
from train.runs import TINY, short_suite, tiny


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
    monkeypatch.setattr(train_speed, "PARTS", parts)
    profile = cProfile.Profile()
    profile.runcall(other)
    found = measure_shares(profile)
    assert sum(found.values()) == pytest.approx(1)
    assert found["optimizers"] > found["hosts and seeds"] > found["absent"] == 0
    assert found[REST] == pytest.approx(0, abs=0.2)


def test_every_part_takes_time_in_a_real_training():
    numbers: list[int] = []
    with short_suite():
        found = measure_training(
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


def test_the_script_ends_with_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["train_speed.py", "--iterations", "1", "--json", *TINY])
    with short_suite():
        train_speed.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["env_steps_per_second"] > 0
    assert last["share"].keys() == {*PARTS, REST}
    assert last["operations_per_decision"] == pytest.approx(sum(last["operations"].values()))


TEN = torch.arange(10.0)
SQUARE = torch.ones(3, 3)


def backward() -> None:
    leaf = TEN.clone().requires_grad_()
    torch.autograd.grad((leaf * leaf.detach()).sum(), leaf)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: TEN.view(2, 5).transpose(0, 1).unsqueeze(0)[:, 1], {}),
        (lambda: TEN.contiguous().to(torch.float32).reshape(5, 2), {}),
        (lambda: torch.empty(3).resize_(4), {}),
        (lambda: TEN + TEN, {"add": 1}),
        (lambda: TEN.to(torch.float64), {"copy_": 1}),
        (TEN.view(2, 5).mT.contiguous, {"copy_": 1}),
        (lambda: TEN.index_select(0, torch.tensor([1, 2])), {"index_select": 1}),
        (lambda: SQUARE @ SQUARE, {"mm": 1}),
        (TEN[0].item, {"_local_scalar_dense": 1}),
        (backward, {"copy_": 1, "mul": 2, "fill_": 2}),
    ],
    ids=["views", "nothing to copy", "memory", "sum", "cast", "copy", "gather", "product", "read", "backward"],
)
def test_only_what_would_launch_a_kernel_counts(work: Callable[[], object], expected: dict[str, int]):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    assert count_operations(cast("list[ProfiledEvent]", profiled.events())) == expected
