"""`esper export` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_what_was_grown_is_exported(tmp_path: Path, capsys: Capture) -> None:
    run, file = tmp_path / "run", tmp_path / "net.pt2"
    words = ["--task", "digits", "--host", "mlp", "--epochs", "1", "--controller", "all_from_start"]
    assert main(["grow", *words, "--set", "batch_size=512", "--run-dir", str(run)]) == 0
    assert main(["export", str(run), "--to", "pt2", "--out", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"exported: {file}"
    program = torch.export.load(file)
    assert any("fossil_" in name for name in program.state_dict)
    assert main(["export", str(run), "--to", "onnx", "--out", str(tmp_path / "net")]) == 2
    assert r"ends in .onnx, not 'net'" in capsys.readouterr().err
    for part in (run / "model").iterdir():
        part.unlink()
    assert main(["export", str(run), "--to", "pt2", "--out", str(file)]) == 2
    assert "model.json is missing" in capsys.readouterr().err


def test_a_missing_run_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", str(tmp_path / "none"), "--to", "pt2", "--out", str(tmp_path / "net.pt2")]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: no run at {tmp_path / 'none'}: give the directory of a run of `esper grow`"
    )
