"""Readers find events by place, type and iteration, in short transactions, and run queries in SQL."""

import shutil
import signal
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from dash.planted_run import Plan, plant
from docs.write_events import view_columns
from esper.cli import EXIT_ERROR, EXIT_OK, main
from esper.dash.app import Access, dashboard
from esper.dash.run_view import RunFinder
from esper.errors import RunError
from esper.runs import database
from esper.runs.events import CheckpointWritten, RunStarted, event_types
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.runs.views import VIEWS
from runs.hostile import attacks, plant_endless_tree

LIMIT = 0.2
"""Seconds that a query may take where nothing but endless ones matters."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create(tmp_path / "run.db") as store:
        store.emit(RunStarted(iteration=0, platform={"esper": "0.1.0"}, seed=3))
        for iteration in range(1, 10):
            store.emit(CheckpointWritten(iteration=iteration, file=f"c{iteration}", sha256="0"))
        store.flush()
        yield store


@pytest.fixture
def reader(store: RunStore) -> Iterator[RunReader]:
    with RunReader.open(store.path) as reader:
        yield reader


def test_records_are_found_by_id_type_and_iteration(reader: RunReader):
    assert [record.id for record in reader.records(after_id=3, limit=4)] == [4, 5, 6, 7]
    assert reader.records(after_id=10) == []
    first = reader.records(limit=1)[0]
    assert (first.type, first.version, first.iteration) == ("run_started", 2, 0)
    assert first.payload == '{"iteration":0,"platform":{"esper":"0.1.0"},"seed":3}'
    assert [record.iteration for record in reader.newest("checkpoint_written", 3)] == [9, 8, 7]
    assert reader.newest("rolled_back") == []
    assert [record.id for record in reader.records_within(4, 4, ["checkpoint_written", "run_started"])] == [5]
    assert reader.records_within(4, 4, ["run_started"]) == []


def test_an_event_that_was_made_anew_is_another_one(store: RunStore, reader: RunReader):
    (last,) = reader.records(after_id=9)
    assert reader.holds(last)
    store.rewind(8)
    assert not reader.holds(last)
    store.emit(CheckpointWritten(iteration=9, file="c9", sha256="0"))
    store.flush()
    assert reader.last_id() == last.id  # SQLite gives the id again
    assert not reader.holds(last)


def test_a_series_can_be_continued(store: RunStore, reader: RunReader):
    store.record_scalars(0, {"x": 0.0})
    store.record_scalars(1, {"x": 0.1})
    store.record_scalars(2, {"x": 0.2})
    store.flush()
    assert reader.series("x") == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert reader.series("x", after=1) == [(2, 0.2)]


def test_a_query_is_one_statement_that_gives_rows_and_columns_and_changes_nothing(reader: RunReader):
    answer = reader.query("SELECT type, count(*) AS n FROM events GROUP BY type ORDER BY n")
    assert answer.columns == ("type", "n")
    assert answer.rows == [("run_started", 1), ("checkpoint_written", 9)]
    assert reader.query("-- a comment") == ((), [])
    with pytest.raises(RunError, match="one statement"):
        reader.query("SELECT 1; SELECT 2")
    with pytest.raises(RunError, match="readonly"):
        reader.query("DELETE FROM events")
    assert reader.last_id() == 10


def test_every_view_can_be_queried_and_its_columns_are_known(reader: RunReader):
    columns = view_columns()
    assert list(columns) == list(VIEWS)
    for view in VIEWS:
        assert reader.query(f"SELECT * FROM {view}").columns == columns[view]


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM nowhere", "no such table: nowhere"),
        ("SELECT nowhat FROM seeds", "no such column: nowhat"),
    ],
)
def test_a_wrong_query_is_answered_by_the_names_of_the_views(reader: RunReader, sql: str, reason: str):
    with pytest.raises(RunError, match=reason) as refused:
        reader.query(sql)
    assert all(view in str(refused.value) for view in VIEWS)


def test_ctrl_c_stops_a_long_query(reader: RunReader):
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT sum(x) FROM n"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (a late alarm must not come outside)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            reader.query(endless)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.parametrize("sql", ["SELECT count(*) FROM events NOT INDEXED", "SELECT max(length(payload)) FROM events"])
def test_a_store_whose_pages_never_end_ends_in_a_sentence(store: RunStore, monkeypatch: pytest.MonkeyPatch, sql: str):
    store.close()
    plant_endless_tree(store.path, "events")
    with RunReader.open(store.path) as reader:
        monkeypatch.setattr(database, "READING_SECONDS", LIMIT)
        for read in (reader.query, reader.rows):
            with pytest.raises(RunError, match=f"{store.path} was stopped after {LIMIT:g} seconds"):
                read(sql)


def test_an_answer_has_a_largest_size(reader: RunReader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("esper.runs.reader.LARGEST_ANSWER", 2**20)
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 100000) SELECT x, 'some text' FROM n"
    for read in (reader.query, reader.rows):
        with pytest.raises(RunError, match="select less of it"):
            read(many)


def test_views_that_a_stranger_added_are_not_read(store: RunStore):
    store.close()
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("DROP VIEW episodes")
        connection.execute("CREATE VIEW episodes AS SELECT 'theirs' AS whose")
        connection.commit()
    with RunReader.open(store.path) as reader:
        assert "whose" not in reader.query("SELECT * FROM episodes").columns


# Stores that somebody has broken on purpose: reading one ends in rows or in one sentence, and soon.


Capture = pytest.CaptureFixture[str]
ATTACKS = attacks()
PATIENCE = 59
"""Seconds after which reading hangs: no query takes a minute."""
SURELY_BROKEN = ("cut at 50%", "metadata an endless view", "events missing", "metadata slots: a number")
"""Attacks that every reader of a run notices."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    plant(folder, Plan(networks=2, slots=1, steps=3))
    (folder / "checkpoints").mkdir()
    (folder / "run.lock").touch()
    return folder


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where being stopped is one of the ways in which reading may end."""
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


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("attack", cases())
def test_every_way_of_opening_and_reading_ends_in_rows_or_in_one_sentence(good: Path, tmp_path: Path, attack: str):
    run = broken(good, tmp_path, attack)
    types = list(event_types())
    try:
        with patience():
            reader = RunReader.open(run.store)
    except RunError as error:
        assert_names_the_store(error, run)
    else:
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
    with patience(), suppress(RunError):  # as a run that goes on does
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
