"""Every command takes every kind of run, or refuses it with hints that name commands which take that kind."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.cli import main
from esper.runs.run_directory import RUN_ADVICE
from grower.training_loop import Loop
from train.runs import TINY
from train.short_suite import short_suite

pytestmark = pytest.mark.landing

Capture = pytest.CaptureFixture[str]

TRAIN = [word for override in (*TINY, "iterations=1") for word in ("--set", override)]
TAKEN = "TAKEN"
"""Stands for the run."""
COMMANDS = {
    "evaluate": ["evaluate", TAKEN, "--instances", "2", "--transfer", "0"],
    "report": ["report", TAKEN],
    "report of several": ["report", TAKEN, TAKEN, "--out", "report"],
    "runs": ["runs", "."],
    "compare": ["compare", TAKEN, TAKEN],
    "train into it": ["train", "--run-dir", TAKEN, *TRAIN],
    "train resumes it": ["train", "--resume", TAKEN],
}
BRIEFLY = {"evaluate": ["--instances", "2", "--transfer", "0"]}
"""What a hint leaves to its reader."""
GOOD_FOR = {
    "train": {"evaluate", "train resumes it"},
    "own": set[str](),
}
"""Which commands besides readers of any run take which."""
FOR_ALL = {"report", "runs"}


@pytest.fixture(scope="module", autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind."""
    folder = tmp_path_factory.mktemp("kinds of runs")
    assert main(["train", "--run-dir", str(folder / "train"), *TRAIN]) == 0
    loop = Loop("none", run=folder / "own")
    loop.epoch()
    loop.grower.close()
    return {name: folder / name for name in GOOD_FOR}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("kind", GOOD_FOR)
def test_it_is_taken_or_refused_with_hints_that_hold(
    kind: str,
    words: list[str],
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(runs[kind], tmp_path / "the run")
    name = next(name for name, one in COMMANDS.items() if one is words)
    code = main([str(run) if word == TAKEN else word for word in words])
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert (code == 0) == (name in GOOD_FOR[kind] | FOR_ALL), told
    for hint in hints(told, run) if code else ():
        assert main(hint) == 0, (told, capsys.readouterr().err)


def hints(told: str, run: Path) -> list[list[str]]:
    """The commands in backticks that are about the run, as a reader would call them."""
    called = [shlex.split(text)[1:] for text in re.findall(r"`(esper [^`]*)`", told)]
    assert all(str(run) in hint for hint in called if len(hint) > 1), told
    return [hint if "--resume" in hint else [*hint, *BRIEFLY.get(hint[0], [])] for hint in called if str(run) in hint]


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_where_there_is_no_run_the_kinds_are_named_that_the_command_takes(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    name = next(name for name, one in COMMANDS.items() if one is words)
    if TAKEN not in words or name.endswith("into it") or name == "compare":
        return
    monkeypatch.chdir(tmp_path)
    assert main(["nowhere" if word == TAKEN else word for word in words]) == 2
    told = capsys.readouterr().err
    assert "`esper train`" in told
    assert (RUN_ADVICE in told) == (name in FOR_ALL)
