"""What a user sees when the machine fails, and that a run goes on from there as if it had not."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from esper.cli import main
from esper.dash.progress import TrainingProgress
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints
from esper.train.iteration import Iteration
from train.runs import assert_same_end, launch, resume_words, train_words

pytestmark = pytest.mark.landing

Capture = pytest.CaptureFixture[str]
Count = Callable[[str, int], None]

SETTINGS = ("iterations=4", "checkpoint_every=2", "probe_every=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "whole"
    assert main(train_words(path, *SETTINGS)) == 0
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def free(folder: Path) -> int:
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize


def stop_after(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Do something to a running training after an iteration."""
    show = TrainingProgress.add

    def show_and_act(view: TrainingProgress, iteration: Iteration) -> None:
        show(view, iteration)
        if iteration.number == number:
            act()

    monkeypatch.setattr(TrainingProgress, "add", show_and_act)


def refused(words: list[str], capsys: Capture) -> str:
    """The one sentence that a command ends in."""
    capsys.readouterr()
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("after", "room", "sentence", "newest"),
    [
        (2, 0, "checkpoint 2 is not saved, earlier ones are intact: cannot write", 0),
        (3, 0, "cannot use the run store .*free some space, then resume the run", 2),
        (1, 100_000, "checkpoint 2 is not saved|cannot use the run store", 0),
    ],
    ids=["checkpoint", "store", "a little room"],
)
def test_a_full_disk(
    disk: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    count_figure: Count,
    after: int,
    room: int,
    sentence: str,
    newest: int,
):
    path, ballast = disk / "run", disk / "ballast"

    def fill() -> None:
        ballast.write_bytes(bytes(free(disk) - room))

    stop_after(monkeypatch, after, fill)
    error = refused(train_words(path, *SETTINGS), capsys)
    assert re.search(sentence, error), error
    assert Checkpoints(RunDirectory(path).checkpoints).latest().iteration == newest
    monkeypatch.undo()
    ballast.unlink()
    assert main(resume_words(path)) == 0
    assert_same_end(path, whole)
    count_figure("faults injected into runs that then went on bit-exactly", 1)


def test_a_full_disk_from_the_beginning(disk: Path, capsys: Capture):
    (disk / "ballast").write_bytes(bytes(free(disk)))
    assert "free some space" in refused(train_words(disk / "run", *SETTINGS), capsys)
    (disk / "ballast").unlink()
    assert main(train_words(disk / "run", *SETTINGS)) == 0


def test_a_read_only_disk(disk: Path, whole: Path, capsys: Capture, count_figure: Count):
    path = shutil.copytree(whole, disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for words in (resume_words(path), ["evaluate", str(path)]):
        sentence = f"cannot write in {path} (Read-only file system): make it writable, or work on a copy"
        assert refused(words, capsys) == sentence
    assert "cannot make the run directory" in refused(train_words(disk / "new", *SETTINGS), capsys)
    assert "cannot write" in refused(["report", str(path)], capsys)
    assert_same_end(path, whole)  # it can be read
    count_figure("faults injected into runs that then went on bit-exactly", 1)


def test_two_processes_on_one_run(tmp_path: Path, capsys: Capture):
    path = tmp_path / "run"
    with launch(train_words(path, "iterations=12")) as process:
        assert process.stdout is not None
        assert any(line.startswith("iteration 1/") for line in process.stdout)  # it is under way
        for words in (resume_words(path), ["evaluate", str(path)]):
            found = refused(words, capsys)
            in_use = f"run {path} is in use by `esper train` (process {process.pid}): wait until it ends, or stop it"
            assert found == in_use
        assert "is not empty" in refused(train_words(path), capsys)
        process.kill()


READER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute(sys.argv[2])
count = lambda: print(connection.execute("SELECT count(*) FROM scalars").fetchone()[0], flush=True)
count()
sys.stdin.readline()
count()
"""


def holding(store: Path, begin: str) -> subprocess.Popen[str]:
    """A process with a transaction open, which ends after a line on its stdin."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", READER, str(store), begin], stdin=pipe, stdout=pipe, text=True)


def test_a_reader_that_never_lets_go(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, count_figure: Count):
    path, readers = tmp_path / "run", list[subprocess.Popen[str]]()

    def read() -> None:
        readers.append(holding(RunDirectory(path).store, "BEGIN"))
        assert int(readers[0].stdout.readline()) > 0

    stop_after(monkeypatch, 1, read)
    assert main(train_words(path, *SETTINGS)) == 0
    assert_same_end(path, whole)
    with RunReader.open(RunDirectory(path).store) as reader:
        first = len(reader.scalars_at(0)) + len(reader.scalars_at(1))
    output, _ = readers[0].communicate("\n", timeout=30)
    assert int(output) == first  # what it saw at first, although there is more by now
    count_figure("faults injected into runs that then went on bit-exactly", 1)


def test_a_writer_that_never_lets_go(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, count_figure: Count
):
    monkeypatch.setattr("esper.runs.database.BUSY_SECONDS", 0.2)
    path, writers = tmp_path / "run", list[subprocess.Popen[str]]()

    def write() -> None:
        writers.append(holding(RunDirectory(path).store, "BEGIN IMMEDIATE"))
        writers[0].stdout.readline()

    stop_after(monkeypatch, 1, write)
    locked = "(database is locked): close the program that has locked it, then resume the run"
    assert locked in refused(train_words(path, *SETTINGS), capsys)
    assert locked in refused(resume_words(path), capsys)
    writers[0].communicate("\n", timeout=30)
    monkeypatch.undo()
    assert main(resume_words(path)) == 0
    assert_same_end(path, whole)
    count_figure("faults injected into runs that then went on bit-exactly", 1)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [torn, flipped, Path.unlink])
def test_a_damaged_checkpoint(tmp_path: Path, whole: Path, damage: Callable[[Path], None], count_figure: Count):
    path = shutil.copytree(whole, tmp_path / "run")
    newest = max(RunDirectory(path).checkpoints.glob("*.safetensors"))
    damage(newest)
    with launch(resume_words(path)) as process:
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    (warning,) = errors.splitlines()
    assert str(newest) in warning
    assert warning.endswith("going back to the checkpoint before it")
    assert "iteration 4/4" in output
    assert_same_end(path, whole)
    count_figure("faults injected into runs that then went on bit-exactly", 1)


def test_lost_checkpoints_do_not_begin_the_run_anew(tmp_path: Path, whole: Path, capsys: Capture):
    path = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(RunDirectory(path).checkpoints)
    assert "no usable checkpoint in" in refused(resume_words(path), capsys)
    with RunReader.open(RunDirectory(path).store) as reader:
        assert reader.last_iteration() == 4


def test_an_empty_store_without_checkpoints_is_made_anew(tmp_path: Path, whole: Path):
    run = RunDirectory.create(tmp_path / "run")
    with run.locked("esper train"):
        shutil.copy(RunDirectory(whole).config, run.config)
        run.store.touch()
    assert main(resume_words(run.path)) == 0
    assert_same_end(run.path, whole)


def test_a_lost_store_is_not_made_anew_beside_checkpoints(tmp_path: Path, whole: Path, capsys: Capture):
    path = shutil.copytree(whole, tmp_path / "run")
    RunDirectory(path).store.unlink()
    assert "is not a run, it has no run.db" in refused(resume_words(path), capsys)


def test_what_is_left_of_a_start_is_no_hindrance(tmp_path: Path, capsys: Capture):
    run = RunDirectory.create(tmp_path / "run")
    with run.locked("esper train"):
        (run.path / ".config.yaml.partial").write_text("iterat")
    assert main(train_words(run.path, "iterations=1")) == 0
    with closing(sqlite3.connect(run.store)) as store:
        assert store.execute("PRAGMA journal_mode").fetchone() == ("wal",)
