"""`esper runs` from the command line."""

import json
from pathlib import Path

import pytest

from esper.cli import main
from esper.runs.events import RunEnded, RunFailed, RunInterrupted, RunStarted
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore

Capture = pytest.CaptureFixture[str]


def begin(path: Path) -> RunStore:
    """The store of a new run."""
    run = RunDirectory.create(path)
    run.config.write_text("{}")
    store = RunStore.create(run.store)
    store.set_metadata({"command": "train", "iterations": 40})
    store.emit(RunStarted(iteration=0, platform={"esper": "0.1.0"}, seed=3))
    return store


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_runs_are_listed_by_state_the_newest_first(tmp_path: Path, capsys: Capture):
    for name, ends in {
        "cut": [],
        "stopped": [RunInterrupted(iteration=2, reason="Ctrl-C")],
        "failed": [RunFailed(iteration=2, reason="out of memory")],
        "done": [RunEnded(iteration=2, seconds=9.0)],
    }.items():
        with begin(tmp_path / name) as store:
            store.record_scalars(2, {"objective": 0.25, "probe_score": 0.5})
            for event in ends:
                store.emit(event)
    begin(tmp_path / "live").close()
    (tmp_path / "no run").mkdir()
    with RunDirectory(tmp_path / "live").locked("esper train"), RunDirectory(tmp_path / "done").locked("evaluate"):
        assert main(["runs", str(tmp_path), "--json"]) == 0
        runs = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert main(["runs", str(tmp_path)]) == 0
    assert [Path(one["run"]).name for one in runs] == ["live", "done", "failed", "stopped", "cut"]
    assert [one["state"] for one in runs] == ["running", "finished", "failed", "interrupted", "interrupted"]
    done = runs[1]
    figures = ["command", "done", "total", "metric", "value", "probe_score"]
    assert [done[name] for name in figures] == ["train", 2, 40, "J", 0.25, 0.5]
    assert done["size"] > 10_000
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("done"))
    assert row[:7] == ["done", "train", "finished", "2/40", "0.500", "J", "0.250"]


def test_a_folder_without_runs_and_one_that_is_missing(tmp_path: Path, capsys: Capture):
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}: `esper train` creates one\n"
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot list")
