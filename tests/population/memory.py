"""How much memory a decision of a population takes at the most."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PEAK = """
import sys
from pathlib import Path
import numpy as np
import torch
from esper.lifecycle.rules import Rules
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationConfig
from esper.lifecycle.actions import Op, make_action

torch.set_num_threads(1)
option, limit = sys.argv[1], int(sys.argv[2]) or None
instances = get_suite("tokens").sample(192, "train", np.random.default_rng(0))
episodes = EvaluationConfig("tokens", Rules(), **{option: limit}).create_episodes(instances)
grow = make_action(Op.GERMINATE, slot=0, blueprint=int(episodes.legal_actions().blueprint[0, 0].argmax()))
actions = np.tile(grow, (len(instances), 1))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew


def read(name):
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(name)).split()[1])


before = read("VmRSS")
episodes.step(actions)
print(read("VmHWM") - before)
"""
"""Prints by how many KiB the process's memory grows at the most in a decision, minibatches included."""


needs_peaks = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured as on Linux")


def measure_growth(option: str, limit: int) -> int:
    """The growth in KiB with ``option``, such as networks_per_pass, at this limit; 0: without one."""
    words = [sys.executable, "-c", PEAK, option, str(limit)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout)
