"""Suites are found by name: Esper's own, and those that files register."""

import subprocess
import sys
from pathlib import Path

import pytest

from esper.cli import main
from esper.errors import TaskError
from esper.rl.gym import GrowthSettings
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite_files import FILES, allow_files
from esper.tasks.token_suite import TokenSuite
from esper.train.settings import TrainSettings

SHORT = """
from esper.rl.gym import GrowthSettings
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


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--suite", "FILE:short"],
        ["bench", "suite", "FILE:short"],
        ["train", "--set", "suite=FILE:short"],
        ["train", "--set=suite=FILE:short"],
        ["tune", "heuristic", "--suite=FILE:short"],
        ["train", "--set", "suite='FILE:short'"],
        ["train", "--set", "mix=[generated, 'FILE:short']"],
        ["train", "--set=mix=[FILE:short,digits]"],
    ],
    ids=" ".join,
)
def test_a_file_is_named_as_a_commands_suite(words: list[str], file: Path) -> None:
    other = file.rename(file.with_name("a=b.py"))
    allow_files([word.replace("FILE", str(other)) for word in words])
    assert get_suite("short").name == "short"


@pytest.mark.parametrize(
    "words",
    [
        ["report", "FILE:short"],
        ["report", "suite", "FILE:short"],
        ["train", "--run-dir", "FILE:short"],
        ["train", "--set", "reward=FILE:short"],
    ],
    ids=" ".join,
)
def test_a_file_that_something_else_is_called_after_is_not_run(words: list[str], file: Path) -> None:
    allow_files([word.replace("FILE", str(file)) for word in words])
    with pytest.raises(TaskError, match="only run where you name it yourself"):
        get_suite(f"{file}:short")


@pytest.mark.parametrize("attribute", ["classes", "steps", "batches_per_step", "batch_size", "test_size"])
@pytest.mark.parametrize("count", ["-6", "0", "2.5", "True", "None"])
def test_a_suite_with_a_count_that_cannot_be_is_refused(file: Path, attribute: str, count: str) -> None:
    file.write_text(f"{SHORT}    {attribute} = {count}\n")
    allow_files(["--suite", f"{file}:short"])
    with pytest.raises(TaskError, match=f"'short' has {attribute} = {count}: give a whole number of at least 1"):
        get_suite("short")


def test_a_file_that_the_caller_of_an_environment_names_is_run(file: Path) -> None:
    assert GrowthSettings.parse({"suite": f"{file}:short"}).suite == f"{file}:short"
    assert get_suite("short").steps == 10


def test_what_lies_beside_a_file_can_be_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file.with_name("beside_mine.py").write_text("STEPS = 7")
    file.write_text(SHORT.replace("    steps = 10", "    from beside_mine import STEPS as steps"))
    allow_files(["--suite", f"{file}:short"])
    assert get_suite("short").steps == 7


def test_a_path_that_the_variable_cannot_hold_is_refused(file: Path) -> None:
    with pytest.raises(TaskError, match="cannot stand in ESPER_SUITES: move the file elsewhere"):
        get_suite(f"{file.parent}/a:b.py:short")


def test_a_file_that_a_configuration_names_is_not_run(file: Path) -> None:
    file.write_text("raise SystemExit")
    with pytest.raises(TaskError, match=f"only run where you name it yourself.*{FILES}="):
        get_suite(f"{file}:short")
    with pytest.raises(TaskError, match="only run where you name it yourself"):
        TrainSettings.model_validate({"suite": f"{file}:short"})


def test_a_name_that_is_unknown_is_refused_with_how_to_name_files(file: Path) -> None:
    assert file.exists()
    with pytest.raises(TaskError, match=f"no suite is called 'short'.*{FILES}=FILE.py"):
        get_suite("short")


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("1 / 0", "short", "mine.py cannot be run: ZeroDivisionError"),
        ("raise SystemExit(0)", "short", "mine.py cannot be run: SystemExit"),
        (SHORT + "    def __init__(self): open('none')", "short", "'short' cannot be made: FileNotFoundError"),
        (SHORT, "digits", "no suite is called 'digits'; choose from short, in .*mine.py"),
        (SHORT, "shorter", "no suite is called 'shorter'; did you mean 'short'"),
        (SHORT.replace('"short"', '"tokens"'), "tokens", "'tokens' of Short is taken by .*:TokenSuite"),
        (SHORT.replace("(TokenSuite)", "(Suite)").replace("import TokenSuite", "import Suite"), "short", "cannot be"),
        (SHORT.replace("    steps = 10\n", "") + "    del TokenSuite.batch_size\n", "short", "does not define batch_"),
        (SHORT + "    objective = 'f1'\n", "short", "has the objective 'f1': accuracy or loss"),
    ],
    ids=[
        *("fails", "exits", "cannot be made", "another suite", "another name", "a taken name", "abstract"),
        *("incomplete", "another objective"),
    ],
)
def test_a_faulty_file_is_refused_with_its_fault(
    file: Path, code: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenSuite, "batch_size", TokenSuite.batch_size)  # put back whatever happens to it
    file.write_text(code)
    allow_files(["--suite", f"{file}:{name}"])
    for _ in range(2):  # the second time as well: nothing is half known
        with pytest.raises(TaskError, match=message):
            get_suite(f"{file}:{name}")


def test_a_missing_file_is_refused(tmp_path: Path, file: Path) -> None:
    assert file.exists()
    allow_files(["--suite", f"{tmp_path}/none.py:short"])
    with pytest.raises(TaskError, match="does not exist"):
        get_suite(f"{tmp_path}/none.py:short")


@pytest.mark.slow
def test_the_command_line_runs_what_it_names(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In workers as well: they are other processes, and know the suite."""
    run = tmp_path / "run"
    small = ["--set", "iterations=1", "--set", "environments=16", "--set", "probe_instances=2", "--set", "shards=2"]
    assert main(["train", "--run-dir", str(run), "--workers", "2", "--set", f"suite={file}:short", *small]) == 0
    assert "suite: short" in (run / "config.yaml").read_text()
    alone = [sys.executable, "-m", "esper", "evaluate", str(run), "--instances", "2"]
    monkeypatch.setenv(FILES, "")
    completed = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert f"{FILES}=FILE.py" in completed.stderr
