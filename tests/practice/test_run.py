"""Runs of `esper grow`: what they do, what they leave, and that they go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from esper.errors import CheckpointError, ConfigError
from esper.growth.persist import load
from esper.lifecycle.actions import Blend
from esper.practice.result import GrowResult
from esper.practice.run import restore
from esper.practice.training import Epoch, measure
from esper.runs.events import LifecycleTransition, RunEnded, RunInterrupted, RunResumed, StepTaken
from esper.runs.reader import RunReader
from esper.tasks.practice.registry import get_host
from practice.runs import digits, grow, growth

LONG = ("epochs=12", "slots={layer2: [lowrank, mlp]}")
"""Long enough for the heuristic to keep or prune a seed."""


def figures(result: GrowResult) -> dict[str, object]:
    """All but what depends on the clock."""
    return {name: value for name, value in vars(result).items() if not name.endswith("seconds")}


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    with RunReader.open(path / "run.db") as reader:
        names = [name for name in reader.scalar_names() if not name.endswith("seconds")]
        return {name: reader.series(name) for name in names}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GrowResult]:
    """A run that the heuristic steered; read only."""
    path = tmp_path_factory.mktemp("practice") / "finished"
    return path, grow(path, *LONG)


def test_a_run_leaves_all_that_happened(finished: tuple[Path, GrowResult]) -> None:
    path, result = finished
    with RunReader.open(path / "run.db") as reader:
        assert [one.iteration for one in reader.events(StepTaken)] == list(range(1, 13))
        assert reader.events(LifecycleTransition)
        assert len(reader.events(RunEnded)) == 1
        assert [number for number, _ in reader.series("validation_loss")] == list(range(1, 13))
    assert json.loads((path / "result.json").read_text())["accuracy"] == result.accuracy
    assert any(choice.op == "germinate" for choice in result.choices)
    assert result.added_parameters == sum(one.parameters for one in result.kept)


def test_the_saved_model_has_the_score_that_the_result_says(finished: tuple[Path, GrowResult]) -> None:
    path, result = finished
    inputs = next(digits().train.in_order(2)).inputs
    host = get_host("mlp").build(tuple(inputs.shape[1:]), digits().classes, torch.Generator().manual_seed(9))
    model = load(path / "model", host, inputs)
    assert measure(model, digits().test).accuracy == result.accuracy
    assert {name: seed.blueprint.name for name, seed in model.seeds.items()} == {
        one.slot: one.blueprint for one in result.kept
    }


@pytest.mark.parametrize("controller", ["heuristic", "random"])
def test_a_stopped_run_goes_on_bit_exactly(controller: str, tmp_path: Path) -> None:
    overrides = (*LONG, f"controller={controller}")
    whole = grow(tmp_path / "whole", *overrides)

    def stop(epoch: Epoch) -> None:
        if epoch.number in (3, 8):
            os.kill(os.getpid(), signal.SIGINT)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            grow(tmp_path / "stopped", *overrides, show=stop)
    resumed = grow(tmp_path / "stopped")
    assert figures(resumed) == figures(whole)
    assert scalars(tmp_path / "stopped") == scalars(tmp_path / "whole")
    # The names of the tensor files hold a hash of their content.
    models = [sorted(file.name for file in (tmp_path / name / "model").iterdir()) for name in ("whole", "stopped")]
    assert models[0] == models[1]
    with RunReader.open(tmp_path / "stopped" / "run.db") as reader:
        assert [one.iteration for one in reader.events(RunInterrupted)] == [3, 8]
        assert [one.iteration for one in reader.events(RunResumed)] == [3, 8]


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    first = grow(tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(
        (tmp_path / "run" / "result.json").read_text().replace('"seed": 0', '"seed": 77')
    )
    assert grow(tmp_path / "run").seed == 77 != first.seed


def test_a_plateau_ends_a_run_also_where_it_is_resumed(tmp_path: Path) -> None:
    overrides = ("controller=none", "learning_rate=1e-9", "conduct.plateau=2")
    seen: list[int] = []
    result = grow(tmp_path / "run", *overrides, show=lambda epoch: seen.append(epoch.number))
    assert seen == [1, 2]
    assert grow(tmp_path / "run", show=lambda epoch: seen.append(epoch.number)) == result
    (tmp_path / "run" / "result.json").unlink()
    assert figures(grow(tmp_path / "run", show=lambda epoch: seen.append(epoch.number))) == figures(result)
    assert seen == [1, 2]


def test_a_host_that_is_never_grown_stays_itself(tmp_path: Path) -> None:
    result = grow(tmp_path / "run", "controller=none")
    assert (result.added_parameters, result.kept, result.choices) == (0, (), ())
    host = 2 * (64 * 32 + 32 * 32 + 32 * 10)
    assert result.training_flops == 3 * host * 1024 * 4  # four epochs of two minibatches of 512


def test_everything_from_the_start_is_there_from_the_first_step(tmp_path: Path) -> None:
    grown = growth("controller=all_from_start")
    assert {slot.name: slot.seed and slot.seed.blueprint.name for slot in grown.model.slots.values()} == {
        "layer1": "mlp_wide",
        "layer2": "mlp_wide",
    }
    before = [parameter.clone() for seed in grown.model.seeds.values() for parameter in seed.parameters()]
    epoch = grown.epoch(1)
    after = [parameter for seed in grown.model.seeds.values() for parameter in seed.parameters()]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert epoch.training_flops > growth("controller=none").epoch(1).training_flops
    result = grow(tmp_path / "run", "controller=all_from_start")
    assert result.added_parameters == sum(one.parameters for one in result.kept) > 0
    assert result.choices == ()


@pytest.mark.parametrize("blend", Blend)
def test_everything_from_the_start_joins_as_the_rules_say(blend: Blend) -> None:
    grown = growth("controller=all_from_start", f"rules.blends=[{blend.name.lower()}]")
    assert {seed.blend for seed in grown.model.seeds.values()} == {blend}


def test_rent_is_taken_off_the_score(tmp_path: Path) -> None:
    result = grow(tmp_path / "run", "controller=all_from_start", "rent=0.5")
    growth_ratio = result.added_parameters / result.host_parameters
    assert result.score == pytest.approx(result.accuracy - 0.5 * torch.tensor(growth_ratio).log1p().item())


def test_unfinished_seeds_are_judged_before_the_test(tmp_path: Path) -> None:
    """Also by a run that was killed before its result was written, and which tells it once."""
    path = tmp_path / "run"
    result = grow(path, "controller=all_at_start", "epochs=3", "batch_size=128")
    (path / "result.json").unlink()
    assert figures(grow(path)) == figures(result)
    with RunReader.open(path / "run.db") as reader:
        ends = [one for one in reader.events(LifecycleTransition) if one.cause == "finish"]
    planted = [choice.slot for choice in result.choices if choice.op == "germinate"]
    assert len(ends) == len(planted) == 2
    kept = [("layer1", "layer2")[one.slot] for one in ends if one.after == "fossilized"]
    assert sorted(kept) == sorted(one.slot for one in result.kept) != []
    for one in ends:
        assert one.iteration == 3
        assert (one.contribution is not None and one.contribution >= 0) == (one.after == "fossilized")


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    results = [figures(grow(tmp_path / str(index), f"seed={seed}")) for index, seed in enumerate((1, 1, 2))]
    assert results[0] == results[1]
    assert results[0]["loss"] != results[2]["loss"]


def test_a_checkpoint_of_something_else() -> None:
    with pytest.raises(CheckpointError, match="no run of `esper grow`"):
        restore(growth(), {}, {})


def test_a_controller_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="did you mean 'heuristic'"):
        growth("controller=heuristik")
