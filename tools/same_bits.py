"""Say whether two versions of Esper compute the same, to the bit.

    python tools/same_bits.py                # the working tree twice: is it deterministic?
    python tools/same_bits.py main           # main, and the working tree as it stands
    python tools/same_bits.py v0.2.0 main    # two revisions
    python tools/same_bits.py main --quick --only train grower_mlp

Each version runs the scenarios of `bit_scenarios.py`, in one thread, with its own ``src`` first on the path; two
processes run side by side. A line per scenario has the SHA-256 of everything that both computed, or what differs.
A version is a revision, which is checked out into a temporary worktree, or a folder that holds ``src/esper``.

Exits with 0 if all scenarios are equal, with 1 if one differs or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCENARIOS = Path(__file__).with_name("bit_scenarios.py")
SHOWN = 10
"""Differences that are named, of each scenario."""
FROM_EACH_PART = 3
"""Of them from each part of a scenario, so that tensors do not hide decisions."""
SILENCE = 30
"""Seconds after which a line says what is still running."""
ABSENT = object()


def main(words: Sequence[str] | None = None) -> int:
    """Compare two versions; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a revision or folder; without it the working tree")
    parser.add_argument("head", nargs="?", help="likewise")
    parser.add_argument("--quick", action="store_true", help="smaller scenarios, about two minutes in all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these scenarios alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all that was computed, as JSON")
    arguments = parser.parse_args(words)
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(check_out(version)) for version in (arguments.base, arguments.head)]
        kept = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same-bits-")))
        folders = [kept.absolute() / side for side in ("base", "head")]
        options = [*arguments.only, *(["--quick"] if arguments.quick else [])]
        sides = zip(sources, folders, strict=True)
        running = [stack.enter_context(start(source, folder, options)) for source, folder in sides]
        names = read_result(folders[0] / "names.json", running[0])
        equal = [compare_scenario(name, folders, running) for name in names]
    write(f"{sum(equal)} of {len(equal)} scenarios are equal")
    return 0 if all(equal) else 1


@contextlib.contextmanager
def check_out(version: str | None) -> Generator[Path]:
    """The folder ``src`` of a version."""
    folder = ROOT if version is None else Path(version)
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        tree = Path(name) / "tree"
        if (folder / "src" / "esper").is_dir():  # a copy, so that it may be edited meanwhile
            shutil.copytree(folder / "src" / "esper", tree / "src" / "esper")
            yield tree / "src"
            return
        try:
            added = run_git("worktree", "add", "--quiet", "--detach", str(tree), str(version))
            if added.returncode:
                sys.exit(f"{version} is neither a revision nor a folder with src/esper: {added.stderr.strip()}")
            yield tree / "src"
        finally:
            run_git("worktree", "remove", "--force", str(tree))


def run_git(*words: str) -> subprocess.CompletedProcess[str]:
    """What git says in this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def start(source: Path, folder: Path, options: Sequence[str]) -> Generator[subprocess.Popen[bytes]]:
    """A process that runs the scenarios with the version in ``source``; it ends with the block, with all its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": "0"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    words = [sys.executable, str(SCENARIOS), str(folder), str(source), *options]
    process = subprocess.Popen(words, env=environment, cwd=folder, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_result(path: Path, process: subprocess.Popen[bytes]) -> Any:
    """What the process wrote there, as soon as it has; says every half a minute that it has not."""
    began = said = time.monotonic()
    while not path.exists():
        if process.poll() is not None and not path.exists():
            sys.exit(f"the process that was to write {path.name} has ended, with exit code {process.returncode}")
        if time.monotonic() - said > SILENCE:
            said = time.monotonic()
            write(f"...     {path.stem}, for {said - began:.0f} s")
        time.sleep(0.1)
    return json.loads(path.read_text())


def compare_scenario(name: str, folders: Sequence[Path], running: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait for both results of a scenario and print whether they are equal."""
    sides = zip(folders, running, strict=True)
    base, head = (read_result(folder / f"{name}.json", process) for folder, process in sides)
    errors = [(side, one["error"]) for side, one in (("base", base), ("head", head)) if "error" in one]
    if errors:
        write(f"FAILED  {name}", *(f"  {side}: {error}" for side, error in errors))
        return False
    mine, other = hash_tree(base["tree"]), hash_tree(head["tree"])
    if mine == other:
        write(f"equal   {name}  {mine[:16]}  {max(base['seconds'], head['seconds']):.1f} s")
        return True
    write(f"DIFFERS {name}  {mine[:16]} != {other[:16]}", *name_differences(base["tree"], head["tree"]))
    return False


def hash_tree(tree: Any) -> str:
    """The SHA-256 of a tree of JSON values."""
    return hashlib.sha256(to_text(tree).encode()).hexdigest()


def to_text(value: Any) -> str:
    """JSON in which equal trees have equal texts, not-a-numbers too."""
    return json.dumps(value, sort_keys=True)


def find_differences(base: Any, head: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Paths of the leaves that differ, with both values; `ABSENT` stands for one that is not there."""
    if isinstance(base, dict | list) and type(base) is type(head):
        one, other = (value if isinstance(value, dict) else dict(enumerate(value)) for value in (base, head))
        for name in one | other:
            yield from find_differences(one.get(name, ABSENT), other.get(name, ABSENT), f"{path}/{name}")
    elif base is ABSENT or head is ABSENT or to_text(base) != to_text(head):
        yield path.removeprefix("/"), base, head


def name_differences(base: Any, head: Any) -> list[str]:
    """Lines that name some of the differences between two trees, and how many there are of each part.

    Parts are the names of highest rank, numbers aside: ``look/decision 3`` and ``look/decision 4`` are one.
    """
    differences = list(find_differences(base, head))
    parts = [re.sub(r"\d+", "N", "/".join(path.split("/")[:2])) for path, _, _ in differences]
    counts, shown, lines = Counter(parts), Counter[str](), list[str]()
    for part, (path, one, other) in zip(parts, differences, strict=True):
        shown[part] += 1
        if shown[part] > FROM_EACH_PART or len(lines) == SHOWN:
            continue
        if one is ABSENT:
            lines.append(f"  {path}: added, {shorten(other)}")
        elif other is ABSENT:
            lines.append(f"  {path}: removed, was {shorten(one)}")
        else:
            lines.append(f"  {path}: {shorten(one)} -> {shorten(other)}")
    if len(differences) > len(lines):
        by_part = ", ".join(f"{part} {count}" for part, count in counts.most_common(SHOWN))
        lines.append(f"  {len(differences)} fields differ: {by_part}")
    return lines


def shorten(value: Any) -> str:
    """A value in a few words."""
    text = to_text(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def write(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that worktrees are removed
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
