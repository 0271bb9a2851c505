"""An atomic write replaces all or nothing, and those who write into one folder take turns."""

import io
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import lock_descriptor
from torch import nn

import esper
from esper import files
from esper.cli import main
from esper.errors import RunError
from esper.files import LOCK_FILE, lock_folder, print_line, write_atomically
from esper.lab.report import write_report
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints
from lab.figures_cases import evaluated
from train.results_cases import planted


@pytest.mark.parametrize(("content", "expected"), [("naïve", "naïve".encode()), (b"\x00\xff", b"\x00\xff")])
def test_text_and_bytes_are_written(tmp_path: Path, content: str | bytes, expected: bytes):
    write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == expected
    assert len(list(tmp_path.iterdir())) == 1


def test_old_content_is_replaced(tmp_path: Path):
    write_atomically(tmp_path / "file", "a long first version")
    write_atomically(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "second"


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_atomically(tmp_path / "file", "old")

    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RunError, match=r"cannot write .*file \(Permission denied\): free some space or choose"):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(RunError, match="cannot write .*No such file or directory"):
        write_atomically(tmp_path / "nowhere" / "file", "x")


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path: Path):
    for path in (tmp_path / "a\0b", tmp_path / "a\0b" / "file"):
        with pytest.raises(RunError, match="cannot write .*null byte"):
            write_atomically(path, "x")


def is_free(folder: Path) -> bool:
    """Whether another thread could write in ``folder`` now."""
    free: list[bool] = []

    def take_lock() -> None:
        try:
            with lock_folder(folder):
                free.append(True)
        except RunError:
            free.append(False)

    thread = threading.Thread(target=take_lock)
    thread.start()
    thread.join()
    return free[0]


class TestLockedFolders:
    @pytest.fixture(autouse=True)
    def nobody_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "LONGEST_WAIT", 0.0)

    @pytest.fixture(params=["folders can be locked", "only files can be locked"])
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        if request.param == "only files can be locked":  # as on NFS

            def lock_files(descriptor: int, *, blocking: bool) -> bool:
                if Path(f"/proc/self/fd/{descriptor}").is_dir():
                    raise OSError(9, "Bad file descriptor")
                return lock_descriptor(descriptor, blocking=blocking)

            monkeypatch.setattr(files, "lock_descriptor", lock_files)
        return tmp_path

    def test_others_are_kept_out_until_the_outermost_block_ends(self, folder: Path):
        with lock_folder(folder):
            with lock_folder(folder):
                write_atomically(folder / "file", "x")
            assert not is_free(folder)
        assert is_free(folder)
        assert {path.name for path in folder.iterdir()} <= {"file", LOCK_FILE}

    def test_an_error_releases_the_folder(self, folder: Path):
        with pytest.raises(ZeroDivisionError), lock_folder(folder):
            raise ZeroDivisionError
        assert is_free(folder)

    def test_who_waits_too_long_is_named_the_reason(self, folder: Path):
        with lock_folder(folder):
            failures: list[str] = []

            def write() -> None:
                try:
                    write_atomically(folder / "file", "x")
                except RunError as error:
                    failures.append(str(error))

            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
        assert "another process has been writing there" in failures[0]
        assert not (folder / "file").exists()

    def test_a_file_system_without_locks_is_written_without(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def refuse(_descriptor: int, *, blocking: bool) -> bool:
            raise OSError(38, f"Function not implemented, {blocking}")

        monkeypatch.setattr(files, "lock_descriptor", refuse)
        write_atomically(tmp_path / "file", "x")
        assert (tmp_path / "file").read_text() == "x"


def test_writers_of_one_file_never_mix_their_content(tmp_path: Path):
    contents = [letter * 200_000 for letter in "abc"]

    def write(content: str) -> None:
        for _ in range(10):
            write_atomically(tmp_path / "file", content)
            assert (tmp_path / "file").read_text() in contents

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def save_model(folder: Path, _run: Path) -> Path:
    esper.save(esper.attach(nn.Sequential(nn.Linear(3, 2)), {"0": "auto"}, torch.zeros(2, 3)), folder / "model")
    return folder / "model"


def save_checkpoint(folder: Path, _run: Path) -> Path:
    Checkpoints(folder / "checkpoints", keep=1).save(1, {"x": torch.ones(2)}, {})
    return folder / "checkpoints"


def report_run(_folder: Path, run: Path) -> Path:
    write_report(RunDirectory(run))
    return run


def report_elsewhere(folder: Path, run: Path) -> Path:
    assert main(["report", str(run), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.mark.parametrize("write", [save_model, save_checkpoint, report_run, report_elsewhere])
@pytest.mark.few(3)
def test_files_that_must_agree_are_written_under_one_lock(
    write: Callable[[Path, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Or else two processes could each write a part of them."""
    written, locked = Counter[Path](), Counter[Path]()
    replace, wait = Path.replace, files._wait_for_lock

    def count_file(self: Path, target: Path) -> Path:
        written[target.parent] += 1
        return replace(self, target)

    def count_lock(descriptor: int, folder: Path) -> None:
        locked[folder] += 1
        wait(descriptor, folder)

    monkeypatch.setattr(Path, "replace", count_file)
    monkeypatch.setattr(files, "_wait_for_lock", count_lock)
    made = evaluated(tmp_path / "run", planted({"policy": 0.6, "none": 0.5}, count=20, stream=0)).path
    written.clear()
    locked.clear()
    folder = write(tmp_path, made)
    assert sum(count for inside, count in written.items() if inside.is_relative_to(folder)) > 1
    assert locked[folder] == 1


def test_a_line_is_printed_where_the_output_lacks_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with verbose=True must not end at the first standard error, as with PYTHONIOENCODING=ascii."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_line("loss 3% ± 1%")
    assert written.getvalue() == b"loss 3% ? 1%\n"
