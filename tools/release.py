"""Make a release: build it, check it where nothing but the core is installed, date the changelog, tag.

    python tools/release.py          # build and check what is here; changes nothing but dist/
    python tools/release.py 0.3.0    # release that version: version, changelog and tag are committed after the check

The check makes a new virtual environment, installs the wheel with what it depends on and no extra, and runs there, in
an empty folder, the code of docs/start.md that new users type, with scikit-learn for its data. Then it adds the extra
that commands need, and runs `esper doctor`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
VERSION_FILE = ROOT / "src" / "esper" / "__init__.py"
CHANGELOG = ROOT / "CHANGELOG.md"
CITATION = ROOT / "CITATION.cff"
BIBTEX = ROOT / "docs" / "how-to" / "paper.md"
START = ROOT / "docs" / "start.md"
UNRELEASED = "## Unreleased"
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_IN_THE_WHEEL = ("esper/py.typed", "esper/__init__.py")


def main() -> None:
    """Exit with a sentence if anything is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="release this version; without it nothing is committed")
    version: str | None = parser.parse_args().version
    if version is None:
        check(build())
        return
    require_releasable(version)
    head = read_git("rev-parse", "HEAD")
    try:
        write_version(version)
        check(build())
        run(
            "git",
            "commit",
            "--quiet",
            "--message",
            f"Release {version}",
            *map(str, (VERSION_FILE, CHANGELOG, CITATION, BIBTEX)),
        )
        run("git", "tag", "--annotate", f"v{version}", "--message", f"Esper {version}")
    except BaseException:
        run("git", "reset", "--quiet", "--hard", head)  # nothing was uncommitted
        raise
    sys.stdout.write(f"tagged v{version}; `git push --follow-tags` publishes it\n")


def require_releasable(version: str) -> None:
    """Exit unless it is a new version, nothing is uncommitted, and the changelog has an entry."""
    if not _NUMBER.fullmatch(version):
        sys.exit(f"{version} is no version such as 0.3.0 or 0.3.0rc1")
    if _read_number(version) < _read_number(read_version()):
        sys.exit(f"{version} is older than the present {read_version()}: choose another version")
    if read_git("status", "--porcelain"):
        sys.exit("there are uncommitted changes: commit them first")
    if read_git("tag", "--list", f"v{version}"):
        sys.exit(f"v{version} was released already: choose another version")
    if not CHANGELOG.read_text().partition(UNRELEASED)[2].partition("\n## ")[0].strip():
        sys.exit(f"{CHANGELOG.name} has nothing below `{UNRELEASED}`: describe what is new")


def write_version(version: str) -> None:
    """Into the package and the BibTeX entry, and with today's date into changelog and citation."""
    day = dt.datetime.now(dt.UTC).date()
    VERSION_FILE.write_text(_VERSION.sub(f'__version__ = "{version}"', VERSION_FILE.read_text(), count=1))
    CHANGELOG.write_text(date_changelog(CHANGELOG.read_text(), version, day))
    undated = re.sub(r"^date-released:.*\n", "", CITATION.read_text(), flags=re.MULTILINE)
    lines = f"version: {version}\ndate-released: {day.isoformat()}"
    CITATION.write_text(re.sub(r"^version:.*$", lines, undated, count=1, flags=re.MULTILINE))
    BIBTEX.write_text(re.sub(r"^(  version = ){.*}", rf"\g<1>{{{version}}}", BIBTEX.read_text(), flags=re.MULTILINE))


def date_changelog(text: str, version: str, day: dt.date) -> str:
    """What was unreleased becomes that version's, below a new heading for what comes next."""
    return text.replace(UNRELEASED, f"{UNRELEASED}\n\n## {version} - {day.isoformat()}", 1)


def build() -> Path:
    """Source distribution and wheel, in dist/; the path of the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder), "build")
        run(python, "-m", "build", "--outdir", str(DIST), str(ROOT))
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check(wheel: Path) -> None:
    """Exit unless the wheel is whole, and a new user's first steps work where only it is installed."""
    inside = set(ZipFile(wheel).namelist())
    files = (path.relative_to(ROOT / "src") for path in (ROOT / "src" / "esper").rglob("*") if path.is_file())
    sources = {str(path) for path in files if "__pycache__" not in path.parts}
    if missing := sorted({*sources, *_IN_THE_WHEEL} - inside):
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
    expected = read_version()
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder) / "environment", str(wheel))
        empty = Path(folder) / "empty"
        empty.mkdir()
        printed = subprocess.run(
            [python, "-I", "-m", "esper", "--version"], cwd=empty, check=True, capture_output=True, text=True
        ).stdout
        if printed != f"esper {expected}\n":
            sys.exit(f"the wheel is {printed.strip()!r}, the sources are {expected}")
        script = empty / "start.py"
        run(python, "-I", "-c", "import esper; esper.attach", cwd=empty)
        script.write_text("\n".join(PYTHON_BLOCK.findall(START.read_text())))
        run(python, "-m", "pip", "install", "--quiet", "scikit-learn")
        run(python, "-I", str(script), cwd=empty)
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[train]")
        run(python, "-I", "-m", "esper", "doctor", cwd=empty)
    sys.stdout.write(f"checked: {wheel.relative_to(ROOT)}\n")


def read_version() -> str:
    """The version in the sources."""
    match = _VERSION.search(VERSION_FILE.read_text())
    if match is None:
        sys.exit(f"{VERSION_FILE} has no version")
    return match[1]


def make_environment(folder: Path, *packages: str) -> str:
    """The Python of a new virtual environment that has these packages."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", *packages)
    return python


def read_git(*words: str) -> str:
    """The output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _read_number(version: str) -> tuple[int, ...]:
    """Without what comes before a release."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def run(*words: str, cwd: Path | None = None) -> None:
    """Run a command, in the repository if nowhere else; exit with its code if it fails."""
    code = subprocess.run(words, cwd=cwd or ROOT, check=False).returncode
    if code:
        sys.exit(f"`{' '.join(words)}` ended with code {code}")


if __name__ == "__main__":
    main()
