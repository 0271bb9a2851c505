"""A release is of a new version, dates the changelog, and is no release if its wheel lacks anything."""

import datetime as dt
import sys
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


def test_the_version_is_written_into_all_files_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERSION_FILE", "CHANGELOG", "CITATION", "BIBTEX"):
        copy = tmp_path / name
        copy.write_text(getattr(release, name).read_text())
        monkeypatch.setattr(release, name, copy)
    release.write_version("9.8.7")
    assert release.read_version() == "9.8.7"
    assert "## 9.8.7 - " in release.CHANGELOG.read_text()
    assert "\nversion: 9.8.7\ndate-released: " in release.CITATION.read_text()
    assert "  version = {9.8.7}" in release.BIBTEX.read_text()


def test_what_new_users_type_is_there_to_be_checked() -> None:
    code = "\n".join(release.PYTHON_BLOCK.findall(release.START.read_text()))
    assert "esper.attach(" in code
    assert "model.finalize()" in code


def test_a_wheel_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "esper.whl"
    with ZipFile(wheel, "w") as file:
        for path in (release.ROOT / "src" / "esper").rglob("*"):
            if path.name == "py.typed" or not path.is_file():
                continue
            file.writestr(str(path.relative_to(release.ROOT / "src")), "")
    with pytest.raises(SystemExit, match=r"esper\.whl lacks esper/py\.typed$"):
        release.check(wheel)


@pytest.mark.parametrize("version", ["1", "v0.3.0", "0.3.0-rc1"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(SystemExit, match="is no version"):
        release.require_releasable(version)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a version and a changelog, whose build takes no time."""
    (tmp_path / "version.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("title: Esper\nversion: 0.1.0\ndate-released: 2026-01-01\nlicense: MIT\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0 - 2026-01-01\n")
    (tmp_path / "paper.md").write_text("@software{esper,\n  title   = {Esper},\n  version = {0.1.0},\n}\n")
    for name, value in {
        "ROOT": tmp_path,
        "VERSION_FILE": tmp_path / "version.py",
        "CHANGELOG": tmp_path / "CHANGELOG.md",
        "CITATION": tmp_path / "CITATION.cff",
        "BIBTEX": tmp_path / "paper.md",
        "build": lambda: tmp_path / "esper.whl",
        "check": lambda _: None,
    }.items():
        monkeypatch.setattr(release, name, value)
    for name, value in {"NAME": "somebody", "EMAIL": "somebody@example.org"}.items():
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    release.run("git", "init", "--quiet")
    release.run("git", "add", ".")
    release.run("git", "commit", "--quiet", "--message", "before")
    return tmp_path


def make_release(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("sys.argv", ["release.py", version])
    release.main()


def test_a_release_is_committed_and_tagged_once(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_release(monkeypatch, "0.2.0")
    assert release.read_git("tag") == "v0.2.0"
    (heading,) = (line for line in (checkout / "CHANGELOG.md").read_text().splitlines() if "## 0.2.0 - " in line)
    day = heading.rpartition(" ")[2]
    citation = f"title: Esper\nversion: 0.2.0\ndate-released: {day}\nlicense: MIT\n"
    assert (checkout / "CITATION.cff").read_text() == citation
    assert "  version = {0.2.0},\n" in (checkout / "paper.md").read_text()
    assert release.read_git("status", "--porcelain") == ""
    for version, why in {"0.2.0": "released already", "0.1.9": "older than", "0.3.0": "nothing below"}.items():
        with pytest.raises(SystemExit, match=why):
            make_release(monkeypatch, version)
    assert release.read_git("tag") == "v0.2.0"


@pytest.mark.parametrize("failing", ["check", "hook"])
def test_a_release_that_fails_leaves_everything_as_it_was(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    head = release.read_git("rev-parse", "HEAD")
    if failing == "check":
        monkeypatch.setattr(release, "check", lambda _: sys.exit("no"))
    else:
        hook = checkout / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    with pytest.raises(SystemExit):
        make_release(monkeypatch, "0.2.0")
    assert (release.read_git("tag"), release.read_git("rev-parse", "HEAD")) == ("", head)
    assert release.read_git("status", "--porcelain") == ""


def test_uncommitted_changes_are_never_lost(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "version.py").write_text('__version__ = "0.2.0"  # mine\n')
    with pytest.raises(SystemExit, match="uncommitted"):
        make_release(monkeypatch, "0.2.0")
    assert "mine" in (checkout / "version.py").read_text()
