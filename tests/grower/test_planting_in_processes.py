"""Seeds planted by hand under DistributedDataParallel learn as one process with all the data would have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grower.planting_processes import RANKS, WAYS, train

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process left behind."""
    folder = tmp_path_factory.mktemp("planting")
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "grower.planting_processes", str(folder), str(rank)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0] * RANKS, "\n".join(errors)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("how", WAYS)
def test_processes_stay_equal_and_do_what_one_does_with_all_the_data(left: list[dict[str, Any]], how: str) -> None:
    first, second = (process[how] for process in left)
    learned = {name: tensor for name, tensor in first.items() if "running" not in name}
    torch.testing.assert_close(learned, {name: second[name] for name in learned}, rtol=0, atol=0)
    assert any(name.startswith("slots.") for name in learned)
    if how == "block":
        return  # each process normalises by its own minibatches
    torch.testing.assert_close(first, train(how, 0, several=False), rtol=1e-3, atol=1e-5)


def test_processes_that_plant_different_seeds_are_refused_in_all_of_them(left: list[dict[str, Any]]) -> None:
    blueprint, slot = left[0]["refused"]
    assert "process 0 plants a mlp in slot '0', but process 1 a norm in slot '0'" in blueprint
    assert "but process 1 a mlp in slot '2'" in slot
    assert left[1]["refused"] == [blueprint, slot]


def test_a_process_that_trains_a_model_without_a_wrapper_waits_for_nobody(left: list[dict[str, Any]]) -> None:
    assert all(process["alone"] for process in left)
