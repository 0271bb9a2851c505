"""Suites are found by name: Esper's own, and those that files register."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from esper.cli import main
from esper.errors import TaskError
from esper.experiments.settings import TrainSettings
from esper.tasks.registry import get_suite, register, suite_names
from esper.tasks.suite_files import FILES, allow_files
from esper.tasks.token_suite import TokenSuite

SHORT = """
from esper.tasks.registry import register
from esper.tasks.token_suite import TokenSuite

@register
class Short(TokenSuite):
    name = "short"
    steps = 10
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that registers the suite ``short``; nobody knows it yet, and nobody will."""
    monkeypatch.setenv(FILES, "")
    monkeypatch.setattr("esper.tasks.registry._suites", {name: get_suite(name).__class__ for name in suite_names()})
    path = tmp_path / "mine.py"
    path.write_text(SHORT)
    return path


def test_default_suite_comes_first() -> None:
    assert suite_names()[0] == "tokens"


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_knows_its_own_name(name: str) -> None:
    assert get_suite(name).name == name


def test_misspelt_suite_names_the_near_one() -> None:
    with pytest.raises(TaskError, match="did you mean 'tokens'"):
        get_suite("token")


def test_foreign_name_lists_all_suites() -> None:
    with pytest.raises(TaskError, match="choose from tokens, digits"):
        get_suite("zzz")


def test_a_suite_of_a_file_that_was_named_goes_by_its_name(file: Path) -> None:
    allow_files(["train", "--set", f"suite={file}:short"])
    assert get_suite(f"{file}:short").steps == 10
    assert get_suite("short") is get_suite(f"{file}:short")
    assert suite_names()[-1] == "short"
    assert TrainSettings.model_validate({"suite": f"{file}:short"}).suite == "short"


def test_a_file_that_a_configuration_names_is_not_run(file: Path) -> None:
    file.write_text("raise SystemExit")
    with pytest.raises(TaskError, match=f"only run where you name it yourself.*{FILES}="):
        get_suite(f"{file}:short")
    with pytest.raises(TaskError, match="only run where you name it yourself"):
        TrainSettings.model_validate({"suite": f"{file}:short"})


def test_a_name_that_is_unknown_says_how_files_are_named(file: Path) -> None:
    assert file.exists()
    with pytest.raises(TaskError, match=f"no suite is called 'short'.*{FILES}=FILE.py"):
        get_suite("short")


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("1 / 0", "short", "mine.py cannot be run for its suites: ZeroDivisionError"),
        (SHORT, "shorter", "no suite is called 'shorter'; did you mean 'short'"),
        (SHORT.replace('"short"', '"tokens"'), "tokens", "name 'tokens' of esper_suites_mine.Short is taken"),
        (SHORT.replace("(TokenSuite)", "(Suite)").replace("import TokenSuite", "import Suite"), "short", "cannot be"),
        (SHORT.replace("    steps = 10\n", "") + "    del TokenSuite.batch_size\n", "short", "does not say its batch_"),
    ],
    ids=["fails", "another name", "a taken name", "abstract", "incomplete"],
)
def test_what_is_wrong_with_a_file_is_said(
    file: Path, code: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenSuite, "batch_size", TokenSuite.batch_size)  # put back whatever happens to it
    file.write_text(code)
    allow_files([f"{file}:{name}"])
    for _ in range(2):  # the second time as well: nothing is half known
        with pytest.raises(TaskError, match=message):
            get_suite(f"{file}:{name}")


def test_a_file_that_is_not_there_is_said(tmp_path: Path, file: Path) -> None:
    assert file.exists()
    allow_files([f"{tmp_path}/none.py:short"])
    with pytest.raises(TaskError, match="there is no such file"):
        get_suite(f"{tmp_path}/none.py:short")


def test_a_taken_name_is_refused(file: Path) -> None:
    assert file.exists()
    with pytest.raises(TaskError, match="name 'tokens' of .*TokenSuite is taken"):
        register(TokenSuite)


@pytest.mark.slow
def test_the_command_line_runs_what_it_names(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In workers as well: they are other processes, and know the suite."""
    run = tmp_path / "run"
    small = ["--set", "iterations=1", "--set", "environments=16", "--set", "probe_instances=2", "--set", "shards=2"]
    assert main(["train", "--run-dir", str(run), "--workers", "2", "--set", f"suite={file}:short", *small]) == 0
    assert "suite: short" in (run / "config.yaml").read_text()
    alone = [sys.executable, "-m", "esper", "evaluate", str(run), "--instances", "2"]
    monkeypatch.setenv(FILES, "")
    told = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert f"{FILES}=FILE.py" in told.stderr
