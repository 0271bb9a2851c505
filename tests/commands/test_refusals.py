"""What commands say of arguments that cannot be what was meant, before anything is computed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from esper.cli import main
from esper.commands.dash import command
from esper.dash import app
from esper.runs.run_directory import RunDirectory

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
    command((tmp_path, tmp_path / "nope"))
    assert (
        capsys.readouterr().out == f"folder {tmp_path / 'nope'} does not exist yet: its runs will appear once it does\n"
    )
