"""Workers return what the tasks asked for, in order, and leave Ctrl-C to the process they serve."""

from __future__ import annotations

import os
import signal

import pytest

from esper.experiments.workers import LocalWorkers
from experiments.worker_tasks import circumstances, fail_on_two, square


def test_one_worker_is_this_process():
    with LocalWorkers(1) as workers:
        assert workers.map(square, [3, 1, 2]) == [9, 1, 4]
        (found,) = workers.map(circumstances, [0])
    assert found[:3] == (os.getpid(), False, 1)


def test_errors_reach_the_caller():
    with pytest.raises(ValueError, match="two"), LocalWorkers(1) as workers:
        workers.map(fail_on_two, [1, 2, 3])


@pytest.mark.slow
def test_processes_work_in_order_and_ignore_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with LocalWorkers(2) as workers:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
        assert workers.map(square, list(range(6))) == [0, 1, 4, 9, 16, 25]
        (found,) = workers.map(circumstances, [0])
        with pytest.raises(ValueError, match="two"):
            workers.map(fail_on_two, [1, 2, 3])
    process, ignores, threads, trim = found
    assert process != os.getpid()
    assert ignores
    assert threads == 1
    assert trim is not None
