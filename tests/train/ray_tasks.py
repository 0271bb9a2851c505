"""Tasks for Ray's workers; its processes have to find them by import."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from esper.rl.rollout import RolloutBuffer
from esper.train.trainer import ShardResult, ShardTask, collect_rollout
from esper.train.workers import Shared
from train.runs import short_suite


class Doomed(NamedTuple):
    """Kills its process at the first attempt."""

    mark: str
    """A file that marks the first attempt; empty: nobody is killed."""
    task: ShardTask


def die_once(mark: str) -> None:
    """As an out-of-memory killer does."""
    if mark and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def square_and_die_once(task: tuple[str, int]) -> int:
    mark, number = task
    die_once(mark)
    return number * number


def die_always(_: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def collect_short(doomed: Doomed) -> ShardResult:
    """`collect` of the short suite, which dies once after some steps."""
    calls = itertools.count()
    add = RolloutBuffer.add

    def deadly(*arguments: Any) -> None:
        if next(calls) == 4:
            die_once(doomed.mark)
        add(*arguments)

    with short_suite(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutBuffer, "add", deadly)
        return collect_rollout(doomed.task)


def shared_sum(task: tuple[int, Shared[list[int]]]) -> int:
    number, shared = task
    return number + sum(shared.get())


def pause_in(folder: str) -> None:
    """Name the process that computes this, by an empty file, and wait to be ended."""
    Path(folder, str(os.getpid())).touch()
    signal.pause()


def pause_unless_empty(folder: str) -> None:
    if folder:
        pause_in(folder)
