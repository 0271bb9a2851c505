"""Every command that reads run stores, on every store that somebody has broken on purpose."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from dash.planted_run import Plan, plant
from esper.cli import COMMANDS, EXIT_ERROR, EXIT_OK, main
from esper.dash.app import dashboard
from esper.dash.runs import RunFinder
from esper.dash.security import Access
from esper.errors import RunError
from esper.runs import database, question, reader
from esper.runs.run_directory import RunDirectory
from esper.runs.views import VIEWS
from runs.hostile import attacks

Capture = pytest.CaptureFixture[str]
ATTACKS = attacks()
LIMIT = 0.2
"""Seconds that a query may take here."""
PATIENCE = 20
"""Seconds after which a command hangs."""
QUERIES = ["SELECT count(*), max(payload) FROM events, metadata, scalars", *(f"SELECT * FROM {view}" for view in VIEWS)]
WORDS: dict[str, list[list[str]]] = {
    "runs": [["runs", "{folder}"], ["runs", "{folder}", "--json"]],
    "report": [["report", "{run}"]],
    "query": [["query", "{run}", sql, "--json"] for sql in QUERIES],
    "export-events": [["export-events", "{run}", "--to", to, "--out", "{folder}/out"] for to in ("jsonl", "csv")],
    "bridge": [["bridge", "{run}", "--to", "tensorboard"]],
    "evaluate": [["evaluate", "{run}"]],
}
"""Calls by command."""
OTHERS = {"train", "grow", "look", "adapt", "export", "compare", "sweep", "tune", "doctor", "dash"}
"""They open no run store, or as `RunDirectory.open_store` and `report` do; `dash` has a test of its own."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    plant(folder, Plan(networks=2, slots=1, steps=3))
    (folder / "checkpoints").mkdir()
    (folder / "run.lock").touch()
    return folder


def cases() -> list[object]:
    """Wrong values are many: with `slow` alone they are all tried."""
    return [pytest.param(name, marks=[pytest.mark.slow] if "." in name or ": " in name else []) for name in ATTACKS] + [
        "events.payload a blob",
        "scalars.value a word",
        "events.time infinity",
        "metadata slots: null",
    ]


@pytest.fixture(params=cases())
def folder(request: pytest.FixtureRequest, good: Path, tmp_path: Path) -> Path:
    """With a broken run and a good one."""
    for name in ("bad", "good"):
        shutil.copytree(good, tmp_path / name)
    ATTACKS[request.param](tmp_path / "bad" / "run.db")
    return tmp_path


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (database, reader):
        monkeypatch.setattr(module, "READING_SECONDS", LIMIT)
    monkeypatch.setattr(question, "ASKING_SECONDS", LIMIT)


def test_every_command_is_tried_or_known_to_read_no_store():
    names = {command.name for command in COMMANDS if not command.name.startswith("bench")}
    assert set(WORDS) | OTHERS == names


def test_every_command_ends_in_an_answer_or_in_one_sentence(folder: Path, capsys: Capture):
    for calls in WORDS.values():
        for words in calls:
            filled = [word.format(folder=folder, run=folder / "bad") if "{" in word else word for word in words]
            with patience(filled):
                code = main(filled)
            error = capsys.readouterr().err
            assert code == EXIT_OK or (code, error[:7], error.count("\n")) == (EXIT_ERROR, "error: ", 1), filled


def test_a_broken_run_hides_no_other(folder: Path, capsys: Capture):
    with patience(["runs"]):
        assert main(["runs", str(folder), "--json"]) == EXIT_OK
    found = {Path(one["run"]).name: one for one in json.loads(capsys.readouterr().out)}
    assert (found["good"]["state"], found["good"]["trouble"]) == ("finished", None)
    trouble = found["bad"]["trouble"]
    assert trouble is None or str(folder / "bad") in trouble
    with patience(["dash"]):
        runs = {one["name"]: one for one in asked(folder, "/api/runs").json()["runs"]}
    assert (runs["good"]["state"], "error" in runs["bad"]) == ("finished", trouble is not None)


def test_the_dashboard_explains(folder: Path):
    for view in ("population", "network", "look", "learning", "events", "compare"):
        with patience([view]):
            answer = asked(folder, f"/api/{view}?run=bad&episode=1&environment=1&step=1")
        assert answer.status_code in (200, 404), (view, answer.text)
        json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_a_run_that_goes_on_is_checked_too(folder: Path):
    with patience(["train"]), suppress(RunError):
        RunDirectory(folder / "bad").open_store().close()


def asked(folder: Path, path: str):
    return TestClient(dashboard(RunFinder((folder,)), Access("127.0.0.1")), base_url="http://127.0.0.1").get(path)


@contextmanager
def patience(words: list[str]) -> Generator[None]:
    def fail(*_: object) -> None:
        pytest.fail(f"{words} hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
