"""Ray's workers give what local ones do, whoever dies on the way."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.errors import RunError
from esper.train.trainer import ShardTask, create_policy
from esper.train.workers import Backend, LocalWorkers, Workers
from train.ray_tasks import (
    Doomed,
    collect_short,
    die_always,
    pause_in,
    pause_unless_empty,
    shared_sum,
    square_and_die_once,
)
from train.runs import ENVIRONMENT, short_suite, tiny
from train.test_workers import gone, processes_at_work
from train.worker_tasks import circumstances, fail_on_two, returned_memory, square

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.slow  # a Ray takes seconds to start, whatever it computes then


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    stopping = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
        with Backend("ray", workers=2).open_workers(2) as workers:
            assert signal.getsignal(signal.SIGTERM) == stopping
            yield workers


def test_results_come_in_the_order_of_the_tasks_from_processes_of_one_thread(two: Workers):
    assert two.map(square, list(range(6))) == [0, 1, 4, 9, 16, 25]
    ((process, _, threads),) = two.map(circumstances, [0])
    assert process != os.getpid()
    assert threads == 1
    (returned,) = two.map(returned_memory, [0])
    assert returned < 1


def test_a_call_that_is_given_up_ends_its_tasks(two: Workers, tmp_path: Path):
    """The second one would wait for ever."""
    results = two.as_completed(pause_unless_empty, ["", str(tmp_path)])
    assert next(results) == (0, None)
    (process,) = processes_at_work(tmp_path, 1)
    results.close()
    wait_for_the_end_of(process)
    assert two.map(square, [2, 3, 4]) == [4, 9, 16]


def test_tasks_that_wait_for_a_cpu_say_so_and_go_on_when_there_is_one(
    two: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("esper.train.ray_workers.SECONDS_BETWEEN_LINES", 1.0)
    ray = pytest.importorskip("ray")
    holder = ray.remote(num_cpus=2)(pause_in).remote(str(tmp_path))
    processes_at_work(tmp_path, 1)
    timer = threading.Timer(3, ray.cancel, (holder,), {"force": True})
    timer.start()
    assert two.map(square, [3]) == [9]
    beginning = "0 of 1 tasks done, 1 under way, for up to 1 s, or waiting: Ray has 0 of 2 CPUs and "
    assert caplog.messages[0].startswith(beginning)


def wait_for_the_end_of(process: int) -> None:
    end = time.monotonic() + 60
    while not gone(process):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_errors_reach_the_caller_as_they_are(two: Workers):
    with pytest.raises(ValueError, match="two") as caught:
        two.map(fail_on_two, [1, 2, 3])
    assert (type(caught.value), str(caught.value)) == (ValueError, "two")
    assert "in fail_on_two" in caught.value.__notes__[0]


def test_shared_values_reach_tasks(two: Workers):
    shared = two.share([1, 2, 3])
    assert two.map(shared_sum, [(number, shared) for number in range(3)]) == [6, 7, 8]
    with LocalWorkers(1) as here:
        local = here.share([1, 2, 3])
        assert here.map(shared_sum, [(number, local) for number in range(3)]) == [6, 7, 8]


def test_a_task_whose_worker_dies_is_begun_anew(two: Workers, tmp_path: Path):
    mark = tmp_path / "mark"
    assert two.map(square_and_die_once, [("", 2), (str(mark), 3)]) == [4, 9]
    assert mark.exists()


def test_a_task_that_always_dies_is_a_typed_error(two: Workers):
    with pytest.raises(RunError, match=r"died 4 times.*--resume"):
        two.map(die_always, [0])
    assert two.map(square, [3]) == [9]


def tensors_of(value: Any) -> list[Any]:
    """All that a result holds but its telling of time."""
    if isinstance(value, torch.Tensor):
        return [value.numpy()]
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in tensors_of(one)]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in tensors_of(one)]
    if is_dataclass(value):
        return [leaf for field in fields(value) for leaf in tensors_of(getattr(value, field.name))]
    return [value]


def collected(workers: Workers, marks: list[str]) -> tuple[list[Any], list[Any]]:
    """What two shards' rollouts came to, and the events of each."""
    with short_suite():
        settings = tiny("shards=2", "telemetry.watched=2")
    weights = workers.share(create_policy(settings).state_dict())
    tasks = [Doomed(mark, ShardTask(settings, 1, shard, weights)) for shard, mark in enumerate(marks)]
    results = workers.map(collect_short, tasks)
    events = [(row.type, row.payload) for result in results for row in result.events]
    return [tensors_of([result.rollout, result.log.accuracies, result.log.objective]) for result in results], events


@pytest.fixture(scope="module")
def expected() -> tuple[list[Any], list[Any]]:
    with short_suite(), LocalWorkers(1) as workers:
        return collected(workers, ["", ""])


def assert_same(found: tuple[list[Any], list[Any]], expected: tuple[list[Any], list[Any]]) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert len(one) > 20
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
    assert found[1] == expected[1]


def test_rollouts_equal_local_ones(two: Workers, expected: tuple[list[Any], list[Any]]):
    assert_same(collected(two, ["", ""]), expected)


def test_a_worker_killed_in_mid_rollout_changes_nothing(
    two: Workers, expected: tuple[list[Any], list[Any]], tmp_path: Path
):
    mark = tmp_path / "mark"
    assert_same(collected(two, ["", str(mark)]), expected)
    assert mark.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gets_through_to_whoever_waits(two: Workers, tmp_path: Path, number: int):
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def press() -> None:
        processes_at_work(tmp_path, 1)
        os.kill(os.getpid(), number)

    before = signal.signal(number, interrupt)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            two.map(pause_in, [str(tmp_path)])
    finally:
        signal.signal(number, before)
        thread.join()
    wait_for_the_end_of(int(next(tmp_path.iterdir()).name))
