"""`esper grow` from the command line."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from esper.cli import main
from esper.dash.answers import describe_model
from esper.dash.growth import GrowthView
from esper.lab.figures.grown import grown_exhibits
from esper.practice.result import read_result
from esper.practice.run import GrowDirectory
from esper.practice.training import Epoch
from esper.runs.reader import RunReader

Capture = pytest.CaptureFixture[str]
QUICK = ("--task", "digits", "--host", "mlp", "--set", "batch_size=512")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_growing_leaves_a_whole_run_directory(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run"
    assert main(["grow", *QUICK, "--epochs", "3", "--seed", "7", "--rent", "0.1", "--run-dir", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "mlp on digits: accuracy 0." in lines[-3]
    assert lines[-2:] == [f"model: {path / 'model'}", f"run: {path}"]
    assert {"config.yaml", "run.db", "checkpoints", "model", "result.json"} <= {one.name for one in path.iterdir()}
    config = (path / "config.yaml").read_text()
    assert "seed: 7" in config
    assert "rent: 0.1" in config


def test_all_views_say_what_the_end_of_growth_made_of_unfinished_seeds(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run"
    words = ["--task", "digits", "--host", "mlp", "--controller", "heuristic", "--epochs", "3"]
    assert main(["grow", *words, "--run-dir", str(path)]) == 0
    found = re.findall(r"^finished: (kept|pruned) (\w+) in (\w+) \(", capsys.readouterr().out, re.MULTILINE)
    assert found
    stages = {slot: {"kept": "fossilized", "pruned": "pruned"}[verb] for verb, _, slot in found}
    run = GrowDirectory(path)
    with RunReader.open(run.store) as reader:
        told, metadata = describe_model(reader), reader.metadata()
    assert told["ending"]["step"] == len(told["decisions"]) == 3
    after = dict(zip(metadata["slots"], told["ending"]["stages"], strict=True))
    assert {slot: after[slot] for slot in stages} == stages
    exhibits = {one.what.name: one.rows for one in grown_exhibits(run.store, metadata, read_result(run.result))}
    lanes = exhibits["stages"].by("slot_name")
    assert {slot: (lanes[slot].texts("decision")[-1], lanes[slot].texts("stage")[-1]) for slot in stages} == {
        slot: ("4", stage) for slot, stage in stages.items()
    }
    changes = exhibits["decisions"].texts("changes")[-1]
    assert all(f"to {stage} (finish)" in changes for stage in stages.values())


def test_growing_prints_a_line_for_machines(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run"
    words = ["--epochs", "1", "--controller", "none", "--run-dir", str(path), "--json"]
    assert main(["grow", *QUICK, *words]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert (record["run"], record["controller"], record["epochs"]) == (str(path), "none", 1)
    assert "epoch 1/1" in captured.err


def test_ctrl_c_leaves_a_run_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path = tmp_path / "my run"
    show = GrowthView.epoch

    def show_and_press(view: GrowthView, epoch: Epoch) -> None:
        show(view, epoch)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(GrowthView, "epoch", show_and_press)
    assert main(["grow", *QUICK, "--epochs", "3", "--run-dir", str(path)]) == 130
    assert capsys.readouterr().out.splitlines()[-1] == f"resume with: esper grow --resume '{path}'"
    monkeypatch.setattr(GrowthView, "epoch", show)
    assert main(["grow", "--resume", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "going on after epoch 1 of 3"
    assert (path / "result.json").exists()


def refused(words: list[str], capsys: Capture) -> str:
    """The one sentence that a mistake ends in."""
    assert main(["grow", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task", "digitz"], "did you mean 'digits'?"),
        (["--host", "gpt"], "'gpt' cannot read task 'digits'"),
        (["--controller", "heuristik"], "did you mean 'heuristic'?"),
        (["--epochs", "0"], "must be at least 1"),
        (["--set", "slots={layer9: auto}"], "no submodule 'layer9'"),
        (["--task", "cifar10"], "CIFAR-10 is not at"),
        (["--task", "charlm", "--text", "nowhere.txt"], "nowhere.txt (No such file or directory)"),
    ],
)
def test_mistakes_leave_no_directory(words: list[str], sentence: str, tmp_path: Path, capsys: Capture) -> None:
    assert sentence in refused([*words, "--run-dir", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()


def test_a_directory_in_use_and_one_that_is_none(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    assert "is not empty: choose a new directory" in refused([*QUICK, "--run-dir", str(tmp_path)], capsys)
    assert "a run of `esper grow`" in refused(["--resume", str(tmp_path / "nowhere")], capsys)


def test_a_resumed_run_keeps_its_settings(tmp_path: Path, capsys: Capture) -> None:
    assert "goes on with the run's own settings" in refused(["--resume", str(tmp_path), "--epochs", "9"], capsys)
