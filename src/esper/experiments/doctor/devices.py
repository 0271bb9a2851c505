"""What torch can compute on."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
_MODEL = re.compile(r"^model name\s*: (.*)$", re.MULTILINE)
_FLAGS = re.compile(r"^(?:flags|Features)\s*: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Device:
    """One device."""

    name: str
    """As torch names it."""
    model: str
    memory: int | None
    """Bytes of its own; None for the CPU, which has the machine's."""
    capability: str
    bf16: bool | None
    """Whether it computes bfloat16 in hardware; None where the system does not tell."""


def devices() -> tuple[Device, ...]:
    """The CPU and every CUDA device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (_cpu(), *(_cuda(index) for index in range(count)))


def _cpu() -> Device:
    try:
        info = CPUINFO.read_text()
    except OSError:
        info = ""
    model, flags = _MODEL.search(info), _FLAGS.search(info)
    return Device(
        "cpu",
        model[1] if model else platform.processor() or platform.machine(),
        None,
        torch.backends.cpu.get_cpu_capability(),
        None if flags is None else "bf16" in flags[1],
    )


def _cuda(index: int) -> Device:
    with torch.cuda.device(index):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        _, memory = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return Device(f"cuda:{index}", torch.cuda.get_device_name(index), memory, f"{major}.{minor}", bf16)
