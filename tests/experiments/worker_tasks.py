"""Tasks for workers; a process that is spawned has to find them by import."""

from __future__ import annotations

import os
import signal

import torch


def square(number: int) -> int:
    return number * number


def fail_on_two(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def circumstances(_: int) -> tuple[int, bool, int, str | None]:
    """Process, whether it ignores Ctrl-C, threads and allocator setting of whoever computes this."""
    ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return os.getpid(), ignores, torch.get_num_threads(), os.environ.get("MALLOC_TRIM_THRESHOLD_")
