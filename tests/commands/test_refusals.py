"""What commands say of arguments that cannot be what was meant, before anything is computed."""

import inspect
import re
import shlex
import shutil
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

import pytest

from esper.cli import COMMANDS, main
from esper.commands.runs import serve_runs
from esper.dash import app
from esper.runs.run_directory import RUN_ADVICE, RunDirectory
from esper.train.workers import Backend
from factories import Loop
from train.runs import TINY

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bench", "suite", "--score", "1"], "--search 6 and --score 1"),
        (["bench", "suite", "--search", "0"], "--search 0 and --score 16"),
        (["compare"], "nothing to compare"),
        (["compare", "a.yaml", "a.yaml"], "a.yaml is given 2 times"),
        (["report", "sweep"], "sweep is a sweep, whose study is in sweep/study.db"),
    ],
)
def test_it_is_refused_at_once(
    words: list[str], sentence: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("iterations: 1\n")
    Path("sweep").mkdir()
    Path("sweep/study.db").touch()
    assert main(words) == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert not told.out


def test_a_run_where_a_folder_of_runs_should_be_is_called_one(tmp_path: Path, capsys: Capture) -> None:
    run = RunDirectory.create(tmp_path / "r")
    with run.open_store():
        pass
    assert main(["runs", str(run.path)]) == 0
    assert f"is itself a run: use `esper report {run.path}`" in capsys.readouterr().out


def test_the_help_of_the_dashboard_needs_no_extra(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    for name in [name for name in sys.modules if name.startswith("starlette.") or name == "esper.dash.app"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as end:
        main(["dash", "--help"])
    assert end.value.code == 0
    assert "Show runs in the browser" in capsys.readouterr().out
    assert main(["dash"]) == 2
    assert "`esper dash` needs starlette" in capsys.readouterr().err


def test_a_folder_that_is_not_there_yet_is_named(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(app, "serve", serve_nothing)
    serve_runs((tmp_path, tmp_path / "nope"))
    assert (
        capsys.readouterr().out == f"folder {tmp_path / 'nope'} does not exist yet: its runs will appear once it does\n"
    )


# A number that no command can do is refused by every command that takes one, before it does anything.


def mentions_integers(hint: Any) -> bool:
    return hint is int or any(map(mentions_integers, get_args(hint)))


def list_integers() -> list[tuple[str, str]]:
    """Commands and their options that are integers."""
    options: list[tuple[str, str]] = []
    for entry in COMMANDS:
        target = resolve_name(entry.target)
        hints = get_type_hints(target, include_extras=True)
        names = [name for name in inspect.signature(target).parameters if mentions_integers(hints[name])]
        options += [(entry.name, name) for name in names]
        if "computing" in hints:
            options += [(entry.name, name) for name, hint in get_type_hints(Backend).items() if mentions_integers(hint)]
    return options


NEEDED = {"sweep": ["space.py:suggest"], "compare": ["a.yaml", "b.yaml"]}
"""Arguments that a command cannot do without."""


@pytest.mark.parametrize("number", [10**9, -(10**9)])
@pytest.mark.parametrize(("command", "option"), list_integers())
def test_an_integer_out_of_bounds_is_refused_at_once(
    command: str,
    option: str,
    number: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    number = number * 10 if option == "seed" else number
    assert main([*command.split(), *NEEDED.get(command, []), f"--{option}", str(number)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: --{option} {number}: give ")
    assert not captured.out
    assert not list(tmp_path.iterdir())


# Every command takes every kind of run, or refuses it with hints that name commands which take that kind.


TRAIN = [word for override in (*TINY, "iterations=1") for word in ("--set", override)]
TAKEN = "TAKEN"
"""Stands for the run."""
FAILING = {
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
GOOD_FOR = {"train": {"evaluate", "train resumes it"}, "own": set[str]()}
"""Which commands besides readers of any run take which."""
FOR_ALL = {"report", "runs"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind."""
    folder = tmp_path_factory.mktemp("kinds of runs")
    assert main(["train", "--run-dir", str(folder / "train"), *TRAIN]) == 0
    loop = Loop("none", run=folder / "own")
    loop.epoch()
    loop.grower.close()
    return {name: folder / name for name in GOOD_FOR}


@pytest.mark.landing
@pytest.mark.parametrize("words", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("kind", GOOD_FOR)
def test_it_is_taken_or_refused_with_hints_that_hold(
    kind: str, words: list[str], runs: dict[str, Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(runs[kind], tmp_path / "the run")
    name = next(name for name, one in FAILING.items() if one is words)
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


@pytest.mark.landing
@pytest.mark.parametrize("words", FAILING.values(), ids=FAILING)
def test_where_there_is_no_run_the_kinds_are_named_that_the_command_takes(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    name = next(name for name, one in FAILING.items() if one is words)
    if TAKEN not in words or name.endswith("into it") or name == "compare":
        return
    monkeypatch.chdir(tmp_path)
    assert main(["nowhere" if word == TAKEN else word for word in words]) == 2
    told = capsys.readouterr().err
    assert "`esper train`" in told
    assert (RUN_ADVICE in told) == (name in FOR_ALL)
