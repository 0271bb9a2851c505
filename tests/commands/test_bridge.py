"""`esper bridge`."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.cli import EXIT_ERROR, EXIT_OK, main
from esper.extras import install_command
from esper.runs.bridges.bridge import LIBRARIES
from runs.bridges.stored_run import begin, end, iterate
from runs.bridges.test_tensorboard import read, steps, texts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("ppo:\n  gamma: 1.0\n")
    (path / "run.lock").touch()
    (path / "checkpoints").mkdir()
    with begin(path / "run.db") as store:
        for number in (1, 2, 3):
            iterate(store, number)
        end(store, 3)
    return path


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_a_run_crosses_once(run: Path, follow: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for carried in (3, 0):
        assert main(["bridge", str(run), "--to", "tensorboard", *follow]) == EXIT_OK
        assert (f"{carried} iterations carried over" in capsys.readouterr().out) is (carried > 0 or not follow)
    folder = run / "bridges" / "tensorboard"
    assert steps(read(folder), "objective") == [1, 2, 3]
    assert "| ppo.gamma | 1.0 |" in texts(folder, "settings")[0]


def test_another_destination_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bridge", str(run), "--to", "tensorboard"]
    assert main(words) == EXIT_OK
    assert main([*words, "--destination", str(tmp_path / "elsewhere")]) == EXIT_ERROR
    assert "give no other destination" in capsys.readouterr().err


def test_a_missing_library_is_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LIBRARIES, "wandb", "no_such_library")
    assert main(["bridge", str(run), "--to", "wandb"]) == EXIT_ERROR
    error = capsys.readouterr().err
    assert error == f"error: this bridge needs no_such_library: {install_command('wandb')}\n"


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bridge", str(tmp_path), "--to", "mlflow"]) == EXIT_ERROR
    assert "is not a run" in capsys.readouterr().err
