"""`esper adapt` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.cli import main

Capture = pytest.CaptureFixture[str]
QUICK = ("--task", "mnist1d", "--host", "conv1d", "--epochs", "3", "--examples", "100", "--seconds", "1")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_tells_what_was_tried_and_what_that_is_worth(capsys: Capture) -> None:
    assert main(["adapt", *QUICK, "--shift", "inversion", "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert record["trials"]
    assert record["kept"] in [trial["structure"] for trial in record["trials"]]
    assert record["accuracy"] > record["host_accuracy"]
    assert record["source_loss"] is None
    assert record["retention"] == {"share": 1.0, "rise": 0.0}
    assert "test data with inversion: accuracy" in captured.err
    assert "structures tried" in captured.err


def test_old_data_are_protected_if_asked(capsys: Capture) -> None:
    assert main(["adapt", *QUICK, "--shift", "cycled", "--protect", "0.05", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["source_loss"] > 0
    assert record["retention"]["rise"] <= 0.05


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("--shift", "invresion"), "did you mean 'inversion'"),
        (("--examples", "50"), "examples is 50"),
        (("--protect", "-1"), "--protect -1"),
        (("--protect", "nan"), "--protect nan"),
        (("--epochs", "0"), "--epochs 0"),
        (("--seconds", "0"), "--seconds 0"),
        (("--task", "charlm", "--host", "gpt"), "this task is text"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words: tuple[str, ...], wrong: str, capsys: Capture) -> None:
    assert main(["adapt", *QUICK, *words]) == 2
    error = capsys.readouterr().err
    assert wrong in error
    assert "Traceback" not in error
