"""An atomic write replaces all or nothing."""

from pathlib import Path

import pytest

from esper.errors import RunError
from esper.files import write_atomically


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
