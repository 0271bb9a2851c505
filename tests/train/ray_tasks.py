"""Tasks for Ray's workers; its processes have to find them by import."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from esper.train.collect import EventRows, ShardResult, ShardTask, collect
from esper.train.workers import Shared
from train.short_suite import short_suite


class Doomed(NamedTuple):
    """Kills its process at the first attempt."""

    mark: str
    """A file that tells of the first attempt; empty: nobody is killed."""
    task: ShardTask


def die_once(mark: str) -> None:
    """As an out-of-memory killer does."""
    if mark and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def count_and_die_once(mark: str) -> Generator[int, None, int]:
    for number in range(6):
        if number == 3:
            die_once(mark)
        yield number
    return os.getpid()


def die_always(_: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def collect_short(doomed: Doomed) -> Generator[EventRows, None, ShardResult]:
    """`collect` of the short suite, which dies once after some steps."""
    with short_suite():
        steps = collect(doomed.task)
        for _ in range(4):
            yield next(steps)
        die_once(doomed.mark)
        return (yield from steps)


def shared_sum(task: tuple[int, Shared[list[int]]]) -> int:
    number, shared = task
    return number + sum(shared.get())


def talk_in(folder: str) -> Generator[int, None, None]:
    """Tell of oneself once and then wait to be ended."""
    Path(folder, str(os.getpid())).touch()
    yield os.getpid()
    signal.pause()
