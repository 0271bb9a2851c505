"""A sweep is an Optuna study whose trials are runs, ranked on the same instances, and it continues from its file."""

import json
from pathlib import Path

import pytest

from esper.cli import main
from esper.commands.sweep import CAUTION
from esper.config.loading import load_settings
from esper.runs.run_directory import RunDirectory
from esper.train.settings import TrainSettings

pytestmark = pytest.mark.landing

Capture = pytest.CaptureFixture[str]
FILE = """
def suggest(trial):
    minibatches = trial.suggest_categorical("minibatches", [2, 16])  # of 8 environments, 16 cannot be made
    return {
        "suite": "short", "environments": 8, "shards": 1, "probe_instances": 2, "iterations": 1,
        "policy": {"hidden": 16, "width": 16}, "ppo.group": 4, "ppo.epochs": 1, "ppo.minibatches": minibatches,
        "seed": trial.suggest_int("seed", 0, 1000),
    }
"""


pytest.importorskip("optuna")


def sweep(folder: Path, *more: str) -> int:
    (folder / "space.py").write_text(FILE)
    words = ["--run-dir", str(folder / "sweep"), "--workers", "1", "--instances", "4", "--json"]
    return main(["sweep", f"{folder / 'space.py'}:suggest", *words, *more])


def test_trials_are_runs_ranked_best_first_and_the_study_continues(tmp_path: Path, capsys: Capture) -> None:
    assert sweep(tmp_path, "--trials", "4") == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    refused = captured.err.count("is refused: 8 environments cannot be split into 16 minibatches")
    assert 0 < refused < 4
    assert CAUTION in captured.err
    assert f"optuna-dashboard {record['study']}" in captured.err
    ranking = record["ranking"]
    assert len(ranking) == 4 - refused
    assert [row["score"] for row in ranking] == sorted((row["score"] for row in ranking), reverse=True)
    for row in ranking:
        run = RunDirectory.open(tmp_path / "sweep" / row["trial"])
        settings = load_settings(TrainSettings, run.config)
        assert row["chosen"] == {"seed": settings.seed, "minibatches": settings.ppo.minibatches}
        assert run.report.exists()

    assert sweep(tmp_path, "--trials", "4") == 0  # all is only read
    assert json.loads(capsys.readouterr().out) == record
    assert sweep(tmp_path, "--trials", "6") == 0
    more = json.loads(capsys.readouterr().out)["ranking"]
    assert all(row in more for row in ranking)
    assert len({row["trial"] for row in more}) == len(more)
    assert not (tmp_path / "sweep" / "trial-006").exists()
    assert sweep(tmp_path, "--trials", "9", "--instances", "5") == 2
    assert "choose another --run-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("space.yaml", "function space.yaml: there is no such file as space.yaml: give FILE.py:NAME"),
        ("space.py:sugest", "defines no class or function 'sugest'; did you mean 'suggest'?"),
    ],
)
def test_a_function_that_is_not_there_is_refused(
    address: str, message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.py").write_text(FILE)
    Path("space.yaml").write_text("space: {seed: [1]}")
    assert main(["sweep", address]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_study_that_cannot_be_used_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "study.db").write_text("no database")
    assert sweep(tmp_path) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith(f"error: cannot use {tmp_path / 'sweep' / 'study.db'} (")
