"""A release is of a new version, dates the changelog, and is no release if its wheel lacks anything."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from zipfile import ZipFile

import pytest

import esper
from tools import release

DAY = dt.date(2027, 1, 2)


def test_the_version_is_read_where_the_package_says_it() -> None:
    assert release.read_version() == esper.__version__


def test_what_was_unreleased_becomes_the_versions() -> None:
    text = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0 - 2026-01-01\n"
    dated = release.date_changelog(text, "0.2.0", DAY)
    assert dated == "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2027-01-02\n\n- new\n\n## 0.1.0 - 2026-01-01\n"


def test_the_version_is_written_into_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERSION_FILE", "CHANGELOG"):
        copy = tmp_path / name
        copy.write_text(getattr(release, name).read_text())
        monkeypatch.setattr(release, name, copy)
    release.write_version("9.8.7")
    assert release.read_version() == "9.8.7"
    assert "## 9.8.7 - " in release.CHANGELOG.read_text()


def test_what_new_users_type_is_there_to_be_checked() -> None:
    code = "\n".join(release.PYTHON_BLOCK.findall(release.START.read_text()))
    assert "esper.attach(" in code
    assert "model.finalize()" in code


def test_a_wheel_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "esper.whl"
    with ZipFile(wheel, "w") as file:
        for path in (release.ROOT / "src").rglob("*.py"):
            file.writestr(str(path.relative_to(release.ROOT / "src")), "")
    with pytest.raises(SystemExit, match=r"esper\.whl lacks esper/py\.typed$"):
        release.check(wheel)


@pytest.mark.parametrize("version", ["1", "v0.3.0", "0.3.0-rc1"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(SystemExit, match="is no version"):
        release.require_releasable(version)
