"""`esper query`, `esper runs` and `esper export-events` from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.cli import main
from esper.runs.events import RunEnded, RunFailed, RunInterrupted, RunStarted
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.runs.views import VIEWS

Capture = pytest.CaptureFixture[str]


def begin(path: Path) -> RunStore:
    """The store of a new run."""
    run = RunDirectory.create(path)
    run.config.write_text("{}")
    store = RunStore.create(run.store)
    store.set_metadata({"command": "train", "iterations": 40})
    store.emit(RunStarted(iteration=0, esper_version="0.1.0", seed=3))
    return store


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    with begin(tmp_path / "run") as store:
        for iteration in range(1, 61):
            store.scalars(iteration, {"objective": iteration / 100})
        store.flush()
        yield tmp_path / "run"


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_an_answer_is_a_table_that_says_what_it_leaves_out(run: Path, capsys: Capture):
    assert main(["query", str(run), "SELECT iteration, value FROM scalars"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["iteration", "value"]
    assert lines[50].split() == ["50", "0.5"]
    assert lines[51] == "10 more rows, 60 in all: --json prints all of them"
    assert len(lines) == 52


def test_json_has_every_row(run: Path, capsys: Capture):
    assert main(["query", str(run), "SELECT iteration, value FROM scalars", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(rows) == 60
    assert rows[4] == {"iteration": 5, "value": 0.05}


def test_json_holds_any_value(run: Path, capsys: Capture):
    assert main(["query", str(run), "SELECT 9e999 a, -9e999 b, x'00ff' c, NULL d, 'é' e", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"a": "Infinity", "b": "-Infinity", "c": "00ff", "d": None, "e": "é"}
    ]


def test_rows_that_are_too_wide_stand_upright(run: Path, capsys: Capture):
    columns = ", ".join(f"'{letter * 20}' AS {letter}" for letter in "abcdef")
    assert main(["query", str(run), f"SELECT {columns} FROM scalars"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [["row", "field", "value"], ["1", "a", "a" * 20], ["1", "b", "b" * 20]]
    assert " ".join(lines[-1]).startswith("55 more rows, 60 in all")


def test_no_rows_are_said_to_be_none(run: Path, capsys: Capture):
    assert main(["query", str(run), "SELECT * FROM seeds"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no rows"


def test_a_table_cannot_steer_the_terminal(run: Path, capsys: Capture):
    assert main(["query", str(run), "SELECT char(27) || '[2J[red]' AS \"a\x1b\""]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J[red]" in out


def test_without_sql_the_views_are_listed(run: Path, capsys: Capture):
    assert main(["query", str(run)]) == 0
    text = capsys.readouterr().out
    assert all(view in text for view in VIEWS)
    assert main(["query", str(run), "--json"]) == 0
    views = {one["view"]: one for one in json.loads(capsys.readouterr().out)}
    assert views["rewards"]["columns"][-2:] == ["term", "value"]
    assert views["rewards"]["row"] == VIEWS["rewards"].meaning


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("DELETE FROM events", "only SELECT is allowed"),
        ("SELECT * FROM sedes", "no such table: sedes"),
        ("SELECT 1 AS a, 2 AS a", "several columns are called a"),
    ],
)
def test_a_wrong_query_is_one_sentence(run: Path, capsys: Capture, sql: str, reason: str):
    assert main(["query", str(run), sql, "--json"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1


def test_runs_are_listed_by_state_the_newest_first(tmp_path: Path, capsys: Capture):
    for name, ends in {
        "cut": [],
        "stopped": [RunInterrupted(iteration=2, reason="Ctrl-C")],
        "failed": [RunFailed(iteration=2, reason="out of memory")],
        "done": [RunEnded(iteration=2, seconds=9.0)],
    }.items():
        with begin(tmp_path / name) as store:
            store.scalars(2, {"objective": 0.25, "probe_score": 0.5})
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
    assert (done["command"], done["done"], done["total"], done["metric"], done["value"], done["probe_score"]) == (
        "train",
        2,
        40,
        "J",
        0.25,
        0.5,
    )
    assert done["size"] > 10_000
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("done"))
    assert row[:7] == ["done", "train", "finished", "2/40", "J", "0.250", "0.500"]


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, capsys: Capture):
    begin(tmp_path / "good").close()
    begin(tmp_path / "bad").close()
    (tmp_path / "bad" / "run.db").write_text("once upon a time, " * 100)
    assert main(["runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "good" in text
    assert "damaged or not a run store" in text


def test_a_folder_without_runs_and_one_that_is_missing(tmp_path: Path, capsys: Capture):
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}: `esper train` makes one\n"
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot list")


def test_events_are_exported(run: Path, tmp_path: Path, capsys: Capture):
    out = tmp_path / "events.jsonl"
    assert main(["export-events", str(run), "--to", "jsonl", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"exported: 1 events to {out}\n"
    assert json.loads(out.read_text())["type"] == "run_started"
