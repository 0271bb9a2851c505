"""Tasks for workers; a process that is spawned has to find them by import."""

import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.train.workers import DeviceTask


@dataclass(frozen=True)
class Placed(DeviceTask):
    """A task for a device that this machine need not have: nothing is computed on it."""

    name: str
    seconds: float = 0.05

    @property
    def device(self) -> str:
        return self.name


def find_process(task: Placed) -> tuple[int, str]:
    """The process that computes this, and the task's device."""
    time.sleep(task.seconds)
    return os.getpid(), task.device


def find_lent_gpu(_: DeviceTask) -> tuple[int, str | None]:
    """The process that computes this, and the GPUs that it sees."""
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


def square(number: int) -> int:
    return number * number


def double(data: bytes) -> bytes:
    return data + data


def fail_on_two(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def circumstances(_: int) -> tuple[int, bool, int]:
    """Process, whether it ignores Ctrl-C, and threads of whoever computes this."""
    return os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN, torch.get_num_threads()


def returned_memory(_: int) -> float:
    """MiB of 96 that go back to the system when four blocks of 24 MiB are freed."""
    blocks = [torch.ones(24 * 2**18) for _ in range(4)]
    used = _resident()
    del blocks
    return used - _resident()


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def holds(path: str) -> bool:
    """Whether the process that computes this has a file open."""
    return any(os.path.realpath(f"/proc/self/fd/{number}") == path for number in os.listdir("/proc/self/fd"))


def sleep_in(folder: str) -> None:
    """Tell which process computes this, by an empty file, and take a minute for it."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


def die_once_there(path: str) -> int:
    """As an out-of-memory killer does, but a computation goes on in the other worker."""
    if path:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def ignored(_: int) -> set[int]:
    """Which of the signals that stop a command are ignored."""
    return {number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_IGN}
