"""Several processes that train one model keep it one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import esper
from esper import Grower
from esper.grower.distributed import Processes
from esper.runs.events import RunResumed, StepTaken
from esper.runs.reader import RunReader
from factories import HELD, make_growing, validate
from grower.planting_processes import WAYS
from grower.planting_processes import train as train_planted
from grower.processes import (
    BLOWN_UP,
    DECISIONS,
    EARLY,
    RANKS,
    RUN,
    SAVED_AFTER,
    SEED,
    copy_forks,
    start_processes,
    train,
)


def run(folder: Path, how: str) -> list[dict[str, Any]]:
    """What each process left behind."""
    said = start_processes("grower.processes", folder, how)
    assert [bool(words) for words in said] == [True, False], "only the first process speaks"
    return [torch.load(folder / f"rank-{rank}-{how}.pt", weights_only=True) for rank in range(RANKS)]


def train_alone(
    model: esper.GrowingModel, decisions: int = DECISIONS, **options: Any
) -> tuple[Grower, list[float], list[str], list[dict[str, Any]]]:
    """One process with all the data: its grower, and after each decision the gradient, the decision and the forks."""
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    settings: dict[str, Any] = {"controller": "random", "evaluate": validate, "horizon": 20, "seed": SEED, **options}
    grower = Grower(model, optimizer, **settings)
    gradients, told, forks = list[float](), list[str](), list[dict[str, Any]]()
    for number in range(decisions):
        gradient, decision = train(model, grower, slice(96), blown_up=number == BLOWN_UP)
        gradients.append(gradient)
        told.append(decision)
        forks.append(copy_forks(grower))
    return grower, gradients, told, forks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("processes")
    return folder, run(folder, "fresh")


@pytest.mark.slow
def test_all_processes_decide_alike_and_hold_equal_models(trained: tuple[Path, list[dict[str, Any]]]):
    first, second = trained[1]
    assert first["told"] == second["told"]
    assert first["gradients"] == second["gradients"]
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
    assert any("germinate" in decision for decision in first["told"][:SAVED_AFTER])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("look", ["germinate"]),
        ("units", ["germinate units_4"]),
        ("constrained", ["source loss up", "prune"]),  # by what only the first has measured before growth
        ("budget", []),  # though only the first measures, and so spends more than the others
    ],
)
def test_what_only_the_first_knows_is_decided_alike_by_all(how: str, words: list[str], tmp_path: Path):
    first, second = run(tmp_path, how)
    assert first["told"] == second["told"]
    assert all(any(word in decision for decision in first["told"]) for word in words)
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
    assert first["rates"] == second["rates"]
    assert (0 in first["rates"]) == (how == "budget")
    assert max(first["rates"]) == 1e-2


@pytest.mark.slow
def test_all_processes_finish_alike_as_one_does(tmp_path: Path):
    first, second = run(tmp_path, "early")
    assert first["ending"] == second["ending"]
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
    ending = train_alone(make_growing(), EARLY)[0].finish()
    assert ending.changes
    assert first["ending"] == str(ending)


@pytest.mark.slow
def test_the_first_process_s_governor_decides(trained: tuple[Path, list[dict[str, Any]]]):
    for left in trained[1]:
        undone = [number for number, told in enumerate(left["told"]) if "rollback" in told]
        assert undone == [BLOWN_UP]


@pytest.mark.slow
def test_training_resumes_on_all_processes(trained: tuple[Path, list[dict[str, Any]]]):
    folder, whole = trained
    resumed = run(folder, "resume")
    for before, after in zip(whole, resumed, strict=True):
        assert len(after["told"]) == DECISIONS - SAVED_AFTER
        assert after["told"] == before["told"][SAVED_AFTER:]
        torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
    assert torch.equal(resumed[0]["grower"], whole[0]["grower"])
    # All processes were given the folder of the run; had more than the first one written, it would have been in use.
    with RunReader.open(folder / RUN / "run.db") as reader:
        assert [step.iteration for step in reader.events(StepTaken)] == list(range(1, DECISIONS + 1))
        assert [event.iteration for event in reader.events(RunResumed)] == [SAVED_AFTER]


@pytest.mark.slow
def test_they_do_what_one_process_does_with_all_the_data(trained: tuple[Path, list[dict[str, Any]]]):
    _, gradients, told, _ = train_alone(make_growing())
    assert trained[1][0]["told"] == told
    assert trained[1][0]["gradients"] == pytest.approx(gradients, rel=1e-3)


@pytest.mark.slow
def test_what_grows_on_a_frozen_host_learns_alike_in_all_processes_as_in_one(tmp_path: Path):
    first, second = run(tmp_path, "frozen")
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
    _, gradients, told, _ = train_alone(make_growing(frozen=True))
    assert first["told"] == second["told"] == told
    assert first["gradients"] == pytest.approx(gradients, rel=1e-3)
    assert any("germinate" in decision for decision in first["told"])
    for name, tensor in make_growing().host.state_dict().items():
        assert torch.equal(first["model"][f"host.{name}"], tensor)


@pytest.mark.slow
def test_forks_learn_alike_in_all_processes_as_in_one(tmp_path: Path):
    first, second = run(tmp_path, "refit")
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
    torch.testing.assert_close(first["forks"], second["forks"], rtol=0, atol=0)
    model = make_growing()
    options: dict[str, Any] = {
        "evaluate": esper.Refit(validate),
        "rules": HELD,
        "loss": lambda inputs, labels: F.cross_entropy(model(inputs), labels),
    }
    _, _, told, forks = train_alone(model, **options)
    assert first["told"] == second["told"] == told
    assert forks[BLOWN_UP - 1]
    torch.testing.assert_close(first["forks"], forks, rtol=1e-3, atol=1e-5)


def test_alone_nothing_is_sent():
    processes = Processes()
    model = make_growing()
    processes.synchronize([model.slots["0"].germinate("mlp", alpha=1.0)])
    assert processes.run_on_first_process(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        processes.run_on_first_process(lambda: 1 // 0)


# Seeds that a grower plants under DistributedDataParallel learn as in one process; planting by hand is refused.


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process left behind."""
    folder = tmp_path_factory.mktemp("planting")
    start_processes("grower.planting_processes", folder)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_processes_stay_equal_and_do_what_one_does_with_all_the_data(planted: list[dict[str, Any]], how: str) -> None:
    first, second = (process[how] for process in planted)
    learned = {name: tensor for name, tensor in first.items() if "running" not in name}
    torch.testing.assert_close(learned, {name: second[name] for name in learned}, rtol=0, atol=0)
    assert any(name.startswith("slots.") for name in learned)
    if how == "block":
        return  # each process normalises by its own minibatches
    torch.testing.assert_close(first, train_planted(how, 0, several=False), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_planting_by_hand_is_refused_in_all_processes(planted: list[dict[str, Any]]) -> None:
    for process in planted:
        assert len(process["refused"]) == 2
        assert all("let an esper.Grower in each process plant" in sentence for sentence in process["refused"])


@pytest.mark.slow
def test_copies_averages_and_saved_models_follow_in_one_process_alone(planted: list[dict[str, Any]]) -> None:
    assert planted[0]["followed"] == [True, True, True]
