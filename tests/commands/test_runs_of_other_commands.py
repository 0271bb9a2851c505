"""A command that is given a run of another one says in one sentence which command serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.cli import main
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore

Capture = pytest.CaptureFixture[str]

SERVES = (
    "a run of `esper.Grower`, and not of `esper train`: it tells of a model that grew in a training loop, which "
    "`esper report "
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_of(path: Path, command: str) -> Path:
    run = RunDirectory.create(path)
    run.config.write_text("{}\n")
    with RunStore.create(run.store) as store:
        store.set_metadata({"command": command})
    return path


@pytest.mark.parametrize(
    "words",
    [["evaluate", "RUN"], ["train", "--resume", "RUN"], ["report", "RUN", "RUN", "--out", "report"]],
    ids=" ".join,
)
def test_the_right_command_is_named(words: list[str], tmp_path: Path, capsys: Capture):
    run = run_of(tmp_path / "run", "grow")
    assert main([str(run) if word == "RUN" else word for word in words]) == 2
    told = capsys.readouterr().err
    assert f"{run} is {SERVES}{run}`" in told
    assert "Traceback" not in told


def test_a_run_that_was_killed_before_it_had_a_store_is_nobody_elses(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    run.config.write_text("{}\n")
    run.lock.touch()
    assert RunDirectory.open_training_run(tmp_path / "run") == run
    run.store.touch()
    assert RunDirectory.open_training_run(tmp_path / "run") == run
