"""Stores that somebody has broken on purpose: reading one ends in rows or in one sentence, and soon."""

import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from dash.planted_run import Plan, plant
from esper.cli import EXIT_ERROR, EXIT_OK, main
from esper.dash.app import Access, dashboard
from esper.dash.run_view import RunFinder
from esper.errors import RunError
from esper.runs import database
from esper.runs.events import event_types
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.runs.views import VIEWS
from runs.hostile import attacks

Capture = pytest.CaptureFixture[str]
ATTACKS = attacks()
LIMIT = 0.2
"""Seconds that a query may take here."""
PATIENCE = 20
"""Seconds after which reading hangs."""
SURELY_BROKEN = ("cut at 50%", "metadata an endless view", "events missing", "metadata slots: a number")
"""Attacks that every reader of a run notices."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    plant(folder, Plan(networks=2, slots=1, steps=3))
    (folder / "checkpoints").mkdir()
    (folder / "run.lock").touch()
    return folder


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "READING_SECONDS", LIMIT)


def broken(good: Path, folder: Path, attack: str) -> RunDirectory:
    """A copy of the good run, under attack."""
    shutil.copytree(good, folder / "bad")
    ATTACKS[attack](folder / "bad" / "run.db")
    return RunDirectory(folder / "bad")


def cases() -> list[object]:
    """Wrong values are many: with `slow` alone they are all tried."""
    return [pytest.param(name, marks=[pytest.mark.slow] if "." in name or ": " in name else []) for name in ATTACKS] + [
        "events.payload a blob",
        "scalars.value a word",
        "events.time infinity",
        "metadata slots: null",
    ]


@pytest.mark.parametrize("attack", cases())
def test_every_way_of_reading_ends_in_rows_or_in_one_sentence(good: Path, tmp_path: Path, attack: str):
    run = broken(good, tmp_path, attack)
    try:
        with patience():
            reader = RunReader.open(run.store)
    except RunError as error:
        assert_names_the_store(error, run)
        return
    types = list(event_types())
    with reader:
        for read in (
            reader.metadata,
            reader.last_id,
            reader.last_iteration,
            reader.scalar_names,
            reader.records,
            lambda: reader.scalars_at(1),
            lambda: [reader.series(name) for name in ("objective", "probe_score")],
            lambda: [reader.events(kind) for kind in event_types().values()],
            lambda: [reader.newest(name, 3) for name in types],
            lambda: [reader.records_within(0, 9, types, environment) for environment in (None, 1)],
            lambda: reader.records_between(0, 99, types),
            *(lambda view=view: reader.query(f"SELECT * FROM {view}") for view in VIEWS),
        ):
            try:
                with patience():
                    read()
            except RunError as error:
                assert_names_the_store(error, run)


@pytest.mark.parametrize("attack", cases())
def test_a_run_that_goes_on_is_checked_too(good: Path, tmp_path: Path, attack: str):
    run = broken(good, tmp_path, attack)
    with patience(), suppress(RunError):
        run.open_store().close()


@pytest.mark.parametrize("attack", SURELY_BROKEN)
@pytest.mark.parametrize("words", [["report"], ["evaluate"], ["train", "--resume"]])
def test_every_command_that_opens_a_store_refuses_it_in_one_sentence(
    good: Path, tmp_path: Path, words: list[str], attack: str, capsys: Capture
):
    run = broken(good, tmp_path, attack)
    with patience():
        assert main([*words, str(run.path)]) == EXIT_ERROR
    error = capsys.readouterr().err
    assert (error[:7], error.count("\n")) == ("error: ", 1)
    assert str(run.path) in error


@pytest.mark.parametrize("attack", SURELY_BROKEN)
def test_in_lists_and_the_dashboard_a_broken_run_hides_no_other(
    good: Path, tmp_path: Path, attack: str, capsys: Capture
):
    run = broken(good, tmp_path, attack)
    shutil.copytree(good, tmp_path / "good")
    with patience():
        assert main(["runs", str(tmp_path)]) == EXIT_OK
    table = capsys.readouterr().out
    assert "good" in table
    assert str(run.path) in table
    app = dashboard(RunFinder((tmp_path,)), Access("127.0.0.1"))
    client = TestClient(app, base_url="http://127.0.0.1")
    with patience():
        runs = {one["name"]: one for one in client.get("/api/runs").json()["runs"]}
        page = client.get("/api/population?run=bad")
    assert runs["good"]["state"] == "finished"
    assert str(run.path) in runs["bad"]["error"]
    assert (page.status_code, str(run.path) in page.json()["error"]) == (404, True)


def assert_names_the_store(error: RunError, run: RunDirectory) -> None:
    assert str(run.store) in str(error)
    assert str(error).isprintable()


@contextmanager
def patience() -> Generator[None]:
    def fail(*_: object) -> None:
        pytest.fail("reading hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
