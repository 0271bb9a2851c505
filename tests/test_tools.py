"""The tools of this repository: equality to the bit, defects that are put back, releases, and figures of code."""

import ast
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from tools import bit_scenarios, release, same_bits, size
from tools.mutations import CHECK, MUTATIONS, ROOT, SOURCE, Mutation, apply, find_catchers, read_lineage

TREE = {"decision 1": {"op": "wait", "loss": 0.5, "contributions": {"1": math.nan}}, "events": [{"step": 0}]}


def change(**fields: Any) -> dict[str, Any]:
    """The tree, with other fields in its decision."""
    return {**TREE, "decision 1": {**TREE["decision 1"], **fields}}


def test_equal_trees_are_equal_in_any_order_and_with_what_is_no_number() -> None:
    same = json.loads(json.dumps(dict(reversed(TREE.items()))))
    assert same_bits.hash_tree(TREE) == same_bits.hash_tree(same)
    assert same_bits.name_differences(TREE, same) == []


@pytest.mark.parametrize("other", [math.nextafter(0.5, 1), 1, "0.5", None])
def test_the_smallest_change_of_a_value_is_named(other: Any) -> None:
    assert same_bits.hash_tree(TREE) != same_bits.hash_tree(change(loss=other))
    assert same_bits.name_differences(TREE, change(loss=other)) == [f"  decision 1/loss: 0.5 -> {json.dumps(other)}"]


def test_what_appears_and_what_is_gone_is_named_as_such() -> None:
    assert same_bits.name_differences(TREE, change(value=1)) == ["  decision 1/value: added, 1"]
    assert same_bits.name_differences(change(value=1), TREE) == ["  decision 1/value: removed, was 1"]
    longer = {**TREE, "events": [*TREE["events"], {"step": 1}]}
    assert same_bits.name_differences(TREE, longer) == ['  events/1: added, {"step": 1}']


def write_results(folder: Path, base: Any, head: Any) -> list[Path]:
    """Results of a scenario ``some`` on both sides."""
    folders = [folder / "base", folder / "head"]
    for side, result in zip(folders, (base, head), strict=True):
        side.mkdir()
        (side / "some.json").write_text(json.dumps(result))
    return folders


def test_a_scenario_that_fails_is_never_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"error": "ValueError: no"}
    folders = write_results(tmp_path, failed, failed)
    assert not same_bits.compare_scenario("some", folders, [None, None])
    assert capsys.readouterr().out == "FAILED  some\n  base: ValueError: no\n  head: ValueError: no\n"


def test_one_line_says_that_a_scenario_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = write_results(tmp_path, {"tree": TREE, "seconds": 1.0}, {"tree": TREE, "seconds": 2.0})
    assert same_bits.compare_scenario("some", folders, [None, None])
    assert capsys.readouterr().out == f"equal   some  {same_bits.hash_tree(TREE)[:16]}  2.0 s\n"


def test_one_bit_of_a_tensor_shows() -> None:
    tensor = torch.linspace(0, 1, 100)
    other = tensor.clone()
    other[50] = torch.nextafter(other[50], torch.tensor(2.0))
    assert bit_scenarios.describe(tensor) == bit_scenarios.describe(tensor.clone())
    assert bit_scenarios.describe(tensor) != bit_scenarios.describe(other)
    assert bit_scenarios.describe(tensor) != bit_scenarios.describe(tensor.double())
    assert bit_scenarios.describe(tensor) != bit_scenarios.describe(tensor.reshape(10, 10))


def test_times_and_versions_are_left_out_wherever_they_stand() -> None:
    described = bit_scenarios.describe({"a": [{"seconds": 1.5, "loss": np.float32(0.1)}], "platform": {"esper": "1"}})
    assert described == {"a": [{"loss": float(np.float32(0.1))}]}


def test_what_is_no_revision_is_refused() -> None:
    with pytest.raises(SystemExit, match="no-such-thing is neither a revision nor a folder with src/esper"):
        same_bits.main(["no-such-thing"])


@pytest.mark.slow
def test_a_changed_constant_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(same_bits.ROOT / "src" / "esper", tmp_path / "src" / "esper")
    formula = tmp_path / "src" / "esper" / "growth" / "promise.py"
    text = formula.read_text()
    assert "RIDGE = 0.1\n" in text
    formula.write_text(text.replace("RIDGE = 0.1\n", "RIDGE = 0.1000001\n"))
    words = [str(same_bits.ROOT), str(tmp_path), "--quick", "--only"]
    assert same_bits.main([*words, "deepen", "look"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("equal   deepen  ")
    assert lines[1].startswith("DIFFERS look  ")
    assert lines[2].startswith("  mlp/rows/0/promise: ")
    assert lines[-1] == "1 of 2 scenarios are equal"
    assert same_bits.main([*words, "deepen"]) == 0


# Every defect that `tools/mutations.py` puts back can still be put back; the tool itself runs the tests.


def copy_file(mutation: Mutation, folder: Path) -> Path:
    copy = folder / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(SOURCE / mutation.file, copy)
    return copy


def test_every_defect_applies_to_the_source_and_makes_another_program(tmp_path: Path) -> None:
    for number, mutation in enumerate(MUTATIONS):
        copy = copy_file(mutation, tmp_path / str(number))
        before = ast.dump(ast.parse(copy.read_text()))
        apply(mutation, tmp_path / str(number))
        assert ast.dump(ast.parse(copy.read_text())) != before, mutation


@pytest.mark.parametrize("passage", ["no such passage", "import"])
def test_a_passage_that_is_not_there_once_is_refused(passage: str, tmp_path: Path) -> None:
    mutation = Mutation("", "engine/engine.py", passage, "")
    copy_file(mutation, tmp_path)
    with pytest.raises(ValueError, match=r"engine/engine.py has .* times, not once"):
        apply(mutation, tmp_path)


def test_every_row_of_the_lineage_has_a_defect_and_every_other_defect_a_room() -> None:
    assert {mutation.row for mutation in MUTATIONS} - {""} == read_lineage().keys()
    for mutation in MUTATIONS:
        assert bool(mutation.row) != bool(mutation.rooms)
        assert all((ROOT / "tests" / room).is_dir() for room in mutation.rooms.split())


@pytest.mark.landing
def test_a_defect_is_caught_by_a_test_that_fails_and_by_no_other() -> None:
    mutation = next(one for one in MUTATIONS if one.row == "D33")
    named = ["tests/train/test_diagnostics.py::test_no_more_updates_are_remembered_than_the_bound"]
    assert find_catchers(mutation, named)[0] == ["no_more_updates_are_remembered_than_the_bound"]
    harmless = Mutation("", "train/iteration.py", '"""A sentence for a person."""', '"""A sentence."""', "D33")
    assert find_catchers(harmless, named)[0] == []


@pytest.mark.landing
def test_a_defect_that_lint_refuses_is_caught_by_lint() -> None:
    mutation = next(one for one in MUTATIONS if one.row == "D36")
    assert find_catchers(mutation, [CHECK])[0] == ["ruff", "lint-imports"]


# A release is of a new version, dates the changelog, and is no release if its wheel lacks anything.


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


# How code is written is counted in the same way for Esper's rooms and for other folders.


CODE = '''"""Two lines
of docstring."""

from typing import (
    NamedTuple,
)


class Pair(NamedTuple):
    # A comment line.
    first: int  # not one


class Plain:
    def forward(self, value):
        """A forwarder."""
        return _once(value)


def _once(value):
    value += 1
    return _twice(_twice(value))


def _twice(value):
    return value
'''


def test_figures_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    lines = CODE.count("\n")
    counts = {"files": 1, "lines": lines, "bytes": len(CODE), "classes": 2, "dataclasses": 1, "forwarders": 1}
    assert size.measure(tmp_path.rglob("*.py"), tmp_path) == {
        **counts,
        "one caller": 1,  # _once; _twice is called at two places
        "imports": 3 / lines,
        "comments": 100 / 13,  # one in 13 lines of code
    }
