"""The machine, as this process may use it."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Machine:
    """Memory in bytes; None where the system does not tell."""

    system: str
    python: str
    cores: int
    """That this process may use."""
    memory: int | None
    available_memory: int | None


def this_machine() -> Machine:
    """What is true now."""
    memory = _memory()
    return Machine(
        platform.platform(),
        f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}",
        _cores(),
        memory.get("MemTotal"),
        memory.get("MemAvailable"),
    )


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> dict[str, int]:
    """Bytes by the kernel's names; empty elsewhere than on Linux."""
    try:
        text = MEMINFO.read_text()
    except OSError:
        return {}
    return {name: int(kibibytes) * 1024 for name, kibibytes in _LINE.findall(text)}
