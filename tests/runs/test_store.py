"""The run store keeps what was flushed, forgets what is rewound, and refuses what it does not know."""

import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import RunError
from esper.runs import database
from esper.runs import store as telemetry_store
from esper.runs.events import CheckpointWritten, LifecycleTransition, RunInterrupted, RunStarted
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from lab.planted import change

TRANSITION = change(9, 0, "dormant", "germinated", "norm", "germinate", iteration=2, episode=2, environment=1)
MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 27 0:40 / /home rw - nfs4 server:/home rw
32 27 0:41 / /mnt/a\040b rw - fuse.sshfs host: rw
33 27 0:42 / /home/me/local rw - xfs /dev/vdb rw
34 27 0:43 / /over rw - ext4 /dev/vdc rw
35 34 0:44 / /over rw - 9p host rw"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunStore]:
    with RunStore.create(tmp_path_factory.mktemp("shared") / "run.db") as store:
        yield store


def test_flushed_events_and_scalars_come_back(path: Path):
    with RunStore.create(path) as store:
        store.set_metadata({"seed": 3, "origin": {"name": "token"}})
        store.emit(RunStarted(iteration=0, platform={"esper": "0.1.0"}, seed=3))
        store.emit(TRANSITION)
        store.record_scalars(1, {"return": 0.5, "entropy": 2.0})
        store.record_scalars(2, {"return": 0.75})

    with RunReader.open(path) as reader:
        assert reader.metadata() == {"seed": 3, "origin": {"name": "token"}}
        assert [reader.decode(record) for record in reader.records()] == [
            RunStarted(iteration=0, platform={"esper": "0.1.0"}, seed=3),
            TRANSITION,
        ]
        assert reader.events(LifecycleTransition) == [TRANSITION]
        assert reader.scalar_names() == ["entropy", "return"]
        assert reader.series("return") == [(1, 0.5), (2, 0.75)]
        assert reader.scalars_at(1) == {"return": 0.5, "entropy": 2.0}
        assert reader.last_iteration() == 2


@given(value=st.floats())
def test_any_float_survives(shared_store: RunStore, value: float):
    shared_store.record_scalars(1, {"x": value})
    shared_store.flush()
    ((_, read),) = shared_store.series("x")
    assert read == value or (math.isnan(read) and math.isnan(value))


@pytest.fixture
def _no_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_store, "COMMIT_SECONDS", 3600.0)


@pytest.mark.usefixtures("_no_commits")
def test_uncommitted_values_are_invisible_to_a_reader(path: Path):
    with RunStore.create(path) as store, RunReader.open(path) as reader:
        store.record_scalars(1, {"x": 1.0})
        store.emit(TRANSITION)
        assert reader.last_iteration() == 0
        assert reader.records() == []
        store.flush()
        assert reader.series("x") == [(1, 1.0)]
        # Rewinding drops what waits.
        store.record_scalars(2, {"x": 1.0})
        store.rewind(1)
    with RunReader.open(path) as reader:
        assert reader.series("x") == [(1, 1.0)]


def test_what_is_emitted_is_soon_seen_by_a_reader_whatever_the_path(tmp_path: Path):
    path = tmp_path / "50% & ? #1.db"
    with RunStore.create(path) as store, RunReader.open(path) as reader:
        store.emit(TRANSITION)
        deadline = time.monotonic() + 60
        while not reader.records() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reader.decode(record) for record in reader.records()] == [TRANSITION]


@pytest.mark.usefixtures("_no_commits")
def test_too_many_events_are_committed_by_whoever_emits_one_more(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(telemetry_store, "CAPACITY", 10)
    with RunStore.create(path) as store, RunReader.open(path) as reader:
        for _ in range(25):
            store.emit(TRANSITION)
        assert len(reader.records()) == 20
    with RunReader.open(path) as reader:
        assert len(reader.records()) == 25


def test_events_of_many_threads_are_all_kept(path: Path):
    with RunStore.create(path) as store:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(400):
                threads.submit(store.emit, TRANSITION)
        store.flush()
        assert len(store.records()) == 400


def test_on_a_shared_file_system_there_is_no_write_ahead_log(path: Path, monkeypatch: pytest.MonkeyPatch):
    mounts = path.with_name("mounts")
    mounts.write_text("27 1 254:0 / / rw shared:1 - nfs4 server:/export rw\n")
    monkeypatch.setattr(database, "MOUNTS", mounts)
    with RunStore.create(path) as store:
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        store.emit(TRANSITION)
        store.flush()
        with RunReader.open(path) as reader:
            assert len(reader.records()) == 1


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/home/me/runs", True),
        ("/home/me/local/runs", False),
        ("/mnt/a b/runs", True),
        ("/homestead", False),
        ("/over/runs", True),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, shared: bool
):
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(database, "MOUNTS", tmp_path / "mounts")
    assert database.lacks_shared_memory(Path(path)) is shared


def test_elsewhere_than_on_linux_the_write_ahead_log_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database, "MOUNTS", tmp_path / "nowhere")
    assert not database.lacks_shared_memory(tmp_path)


def test_a_killed_process_loses_only_what_was_not_flushed(path: Path):
    script = f"""
import os, signal
from pathlib import Path
from esper.runs.store import RunStore
store = RunStore.create(Path({str(path)!r}))
store.record_scalars(1, {{"x": 1.0}})
store.flush()
store.record_scalars(2, {{"x": 2.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", script], check=False)
    assert process.returncode == -signal.SIGKILL
    with RunStore.open(path) as store:
        assert store.series("x") == [(1, 1.0)]
        store.record_scalars(2, {"x": 2.5})
    with RunReader.open(path) as reader:
        assert reader.series("x") == [(1, 1.0), (2, 2.5)]


def test_a_rewound_run_equals_an_uninterrupted_one(tmp_path: Path):
    def iterate(store: RunStore, iterations: range):
        for iteration in iterations:
            store.record_scalars(iteration, {"x": iteration / 7})
            store.emit(CheckpointWritten(iteration=iteration, file=f"c{iteration}", sha256="0"))
            store.flush()

    with RunStore.create(tmp_path / "whole.db") as whole:
        iterate(whole, range(1, 7))
    with RunStore.create(tmp_path / "cut.db") as cut:
        iterate(cut, range(1, 6))
        cut.emit(RunInterrupted(iteration=5, reason="Ctrl-C"))
    with RunStore.open(tmp_path / "cut.db") as cut:
        cut.rewind(3)
        iterate(cut, range(4, 7))

    with RunReader.open(tmp_path / "whole.db") as whole, RunReader.open(tmp_path / "cut.db") as cut:
        assert cut.series("x") == whole.series("x")
        assert cut.events(CheckpointWritten) == whole.events(CheckpointWritten)
        assert cut.events(RunInterrupted) == [RunInterrupted(iteration=5, reason="Ctrl-C")]


def test_a_later_value_replaces_an_earlier_one(path: Path):
    with RunStore.create(path) as store:
        store.record_scalars(1, {"x": 1.0})
        store.record_scalars(1, {"x": 2.0})
        store.flush()
        assert store.series("x") == [(1, 2.0)]


@pytest.mark.usefixtures("_no_commits")
def test_a_failed_flush_keeps_everything_for_the_next(path: Path):
    with RunStore.create(path) as store:
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        store.record_scalars(1, {f"a rather long name of a scalar {index}": 0.0 for index in range(2000)})
        with pytest.raises(RunError, match=r"run\.db \(database or disk is full\)"):
            store.flush()
        assert store.scalar_names() == []
        store._connection.execute("PRAGMA max_page_count = 1000000")
        store.flush()
        assert len(store.scalar_names()) == 2000


@pytest.mark.parametrize("kind", [RunReader, RunStore])
def test_what_is_not_a_run_store_is_refused_and_left_as_it_is(path: Path, kind: type[RunReader]):
    with pytest.raises(RunError, match=f"no run store at {path}"):
        kind.open(path)
    assert not path.exists()
    for number, (content, message) in enumerate(
        {b"": "is not an Esper run store", b"once upon a time, " * 100: "is damaged or not a run store"}.items()
    ):
        other = path.with_name(f"{number}.db")
        other.write_bytes(content)
        with pytest.raises(RunError, match=message):
            kind.open(other)
        assert other.read_bytes() == content
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    with pytest.raises(RunError, match="is not an Esper run store"):
        kind.open(path)
    path.unlink()
    RunStore.create(path).close()
    with pytest.raises(RunError, match="exists already"):
        RunStore.create(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 77")
    connection.close()
    with pytest.raises(RunError, match="has format 77"):
        kind.open(path)


def test_a_truncated_store_is_an_error_not_a_crash(path: Path):
    with RunStore.create(path) as store:
        for iteration in range(2000):
            store.record_scalars(iteration, {"x": 1.0})
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(RunError, match=r"run\.db"), RunReader.open(path) as reader:
        reader.series("x")


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.02, 0.11, 0.23])
def test_a_kill_loses_no_acknowledged_event(path: Path, count_figure: Callable[[str, int], None], moment: float):
    script = f"""
import sys
from pathlib import Path
from esper.runs.events import CheckpointWritten
from esper.runs.store import RunStore
store = RunStore.create(Path({str(path)!r}))
for number in range(1, 10**9):
    store.emit(CheckpointWritten(iteration=number, file="c", sha256="0"))
    if number % 7 == 0:
        store.flush()
        print(number, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    told = [process.stdout.readline()]
    time.sleep(moment)
    process.kill()
    told += process.stdout.readlines()
    process.wait()
    acknowledged = [int(line) for line in told if line.endswith("\n")][-1]
    with RunStore.open(path) as store:
        kept = [event.iteration for event in store.events(CheckpointWritten)]
    assert kept == list(range(1, len(kept) + 1))
    assert len(kept) >= acknowledged
    count_figure("acknowledged events that a kill -9 left", acknowledged)
