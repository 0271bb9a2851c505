"""`esper report` writes a page, and with --out what a paper needs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from esper.cli import main
from ui.figures_cases import trained


def test_the_page_lies_in_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    assert run.report.is_file()
    assert capsys.readouterr().out == f"report: {run.report}\n"


def test_figures_and_tables_lie_beside_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run, out = trained(tmp_path / "run", steps=False), tmp_path / "new" / "out"
    assert main(["report", str(run.path), "--out", str(out)]) == 0
    assert (out / "report.html").is_file()
    assert not run.report.exists()
    assert {path.suffix for path in (out / "figures").iterdir()} == {".pdf", ".png", ".csv", ".sql"}
    assert {path.suffix for path in (out / "tables").iterdir()} == {".tex", ".csv", ".sql"}
    words = capsys.readouterr().out
    assert "left out rewards: " in words
    assert f"7 figures: {out / 'figures'}" in words


def test_without_matplotlib_one_sentence_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert main(["report", str(run.path), "--out", str(tmp_path / "out")]) == 2
    words = capsys.readouterr().err
    assert words == "error: drawing figures needs matplotlib: pip install 'esper-growth[report]'\n"
    assert not (tmp_path / "out").exists()
    assert main(["report", str(run.path)]) == 0


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "neither a run nor a comparison" in capsys.readouterr().err


def test_a_file_in_the_way_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    (tmp_path / "file").touch()
    assert main(["report", str(run.path), "--out", str(tmp_path / "file")]) == 2
    assert "choose another place" in capsys.readouterr().err
