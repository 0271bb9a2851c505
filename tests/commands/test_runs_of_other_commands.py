"""A command that is given a run of another one says in one sentence which command serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.cli import main
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore

Capture = pytest.CaptureFixture[str]

SERVES = {
    "train": "a run of `esper train`, and not of `esper grow`: it holds a controller, which `esper evaluate ",
    "grow": "a run of `esper grow`, and not of `esper train`: it holds a model that has grown, which `esper report ",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_of(path: Path, command: str) -> Path:
    run = RunDirectory.create(path)
    run.config.write_text("{}\n")
    with RunStore.create(run.store) as store:
        store.set_metadata({"command": command, "task": "digits"})
    return path


@pytest.mark.parametrize(
    ("made_by", "words"),
    [
        ("train", ["export", "RUN", "--to", "pt2", "--out", "net.pt2"]),
        ("train", ["grow", "--resume", "RUN"]),
        ("grow", ["evaluate", "RUN"]),
        ("grow", ["train", "--resume", "RUN"]),
        ("grow", ["report", "RUN", "RUN", "--out", "report"]),
        ("grow", ["grow", "--task", "digits", "--controller", "RUN"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_right_command_is_named(made_by: str, words: list[str], tmp_path: Path, capsys: Capture):
    run = run_of(tmp_path / "run", made_by)
    given = [str(run) if word == "RUN" else word for word in words]
    if words[0] == "grow" and "--resume" not in words:
        given += ["--run-dir", str(tmp_path / "new")]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert f"{run} is {SERVES[made_by]}{run}`" in told
    assert "Traceback" not in told


def test_a_run_that_was_killed_before_it_had_a_store_is_nobody_elses(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    run.config.write_text("{}\n")
    run.lock.touch()
    assert RunDirectory.open_own(tmp_path / "run") == run
    run.store.touch()
    assert RunDirectory.open_own(tmp_path / "run") == run
