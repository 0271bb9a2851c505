"""Seeds that a grower plants under DistributedDataParallel learn as in one process; planting by hand is refused."""

from typing import Any

import pytest
import torch

from grower.planting_processes import RANKS, WAYS, train
from grower.processes import start_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process left behind."""
    folder = tmp_path_factory.mktemp("planting")
    start_processes("grower.planting_processes", folder)
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


def test_planting_by_hand_is_refused_in_all_processes(left: list[dict[str, Any]]) -> None:
    for process in left:
        assert len(process["refused"]) == 2
        assert all("let an esper.Grower in each process plant" in sentence for sentence in process["refused"])


def test_copies_averages_and_saved_models_follow_in_one_process_alone(left: list[dict[str, Any]]) -> None:
    assert left[0]["followed"] == [True, True, True]
