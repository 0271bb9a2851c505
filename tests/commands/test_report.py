"""`esper report` writes a page, and with --out what a paper needs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.cli import main
from esper.config.loading import dump_settings
from esper.lab.analysis import FEWEST_SEEDS
from esper.lab.evaluate import write_behaviour
from esper.runs.run_directory import RunDirectory
from esper.train.settings import TrainSettings
from lab.figures_cases import BEHAVIOUR, ITERATIONS, evaluated, trained
from train.results_cases import planted

pytestmark = pytest.mark.landing


def test_the_page_lies_in_the_run_or_beside_its_figures_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = trained(tmp_path / "run", steps=False), tmp_path / "new" / "out"
    assert main(["report", str(run.path), "--out", str(out)]) == 0
    assert (out / "report.html").is_file()
    assert not run.report.exists()
    assert {path.suffix for path in (out / "figures").iterdir()} == {".pdf", ".png", ".svg", ".csv", ".sql"}
    assert {path.suffix for path in (out / "tables").iterdir()} == {".csv", ".sql"}
    words = capsys.readouterr().out
    assert f"2 figures: {out / 'figures'}" in words
    assert f"2 tables: {out / 'tables'}" in words
    assert main(["report", str(run.path)]) == 0
    assert run.report.is_file()
    assert capsys.readouterr().out == f"report: {run.report}\n"


def test_what_cannot_be_reported_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained(tmp_path / "run").path)
    (tmp_path / "file").touch()
    for words, sentence in (
        ([run, "--bare", run], "a bare host is compared with one run of a `Grower`"),
        ([str(tmp_path)], "neither a run nor a comparison"),
        ([run, "--out", str(tmp_path / "file")], "choose another place"),
    ):
        assert main(["report", *words]) == 2
        assert sentence in capsys.readouterr().err


def of_seed(folder: Path, seed: int, count: int = 60) -> RunDirectory:
    """An evaluated run whose policy is above the baseline, by more with every seed."""
    results = planted({"policy": 0.6 + 0.01 * seed, "none": 0.5}, count=count, stream=seed)
    return evaluated(folder / f"seed{seed}", results, seed=seed)


def reported(*words: object) -> int:
    return main(["report", *map(str, words)])


@pytest.mark.parametrize("seeds", [2, FEWEST_SEEDS])
def test_runs_of_several_seeds_speak_of_the_way_of_training(
    seeds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = [of_seed(tmp_path, seed).path for seed in range(seeds)], tmp_path / "out"
    assert reported(*runs, "--out", out) == 0
    words, page = capsys.readouterr().out, (out / "report.html").read_text()
    said = "none: policy better" if seeds == FEWEST_SEEDS else "none: too few seeds to say"
    assert said in words
    assert said.removeprefix("none: ") in page
    assert "this way of training" in words
    assert {path.name for path in (out / "tables").iterdir()} >= {"evaluation_heldout.csv", "evaluation_heldout.txt"}
    assert not any((run / "report.html").exists() for run in runs)


def configured(**settings: Any) -> Callable[[RunDirectory], None]:
    return lambda run: dump_settings(TrainSettings(iterations=ITERATIONS, **settings), run.config)


def on_fewer_instances(run: RunDirectory) -> None:
    evaluated(run.path.parent / "fewer", planted({"policy": 0.6, "none": 0.5}, count=30)).evaluation.replace(
        run.evaluation
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda run: run.evaluation.unlink(),
            "seed1/evaluation.json (No such file or directory): make it with `esper evaluate",
        ),
        (
            configured(seed=1, suite="digits"),
            "(suite): give runs that differ in their seed alone, or compare ways of training with",
        ),
        (configured(seed=1, ppo={"clip": 0.1}), "(ppo.clip): give runs that differ in their seed alone"),
        (configured(seed=0), "two of the runs have training seed 0: give every seed once"),
        (
            lambda run: write_behaviour(run.behaviour, replace(BEHAVIOUR, iteration=1)),
            f"seed1 was evaluated after iteration 1, {{}} after {ITERATIONS}: train them equally",
        ),
        (lambda run: run.config.unlink(), "seed1 is not a run"),
        (on_fewer_instances, "different numbers of instances: evaluate them all with the same --instances"),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_runs_that_do_not_belong_together_are_one_sentence(
    spoil: Callable[[RunDirectory], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = of_seed(tmp_path, 0), of_seed(tmp_path, 1)
    spoil(second)
    assert reported(first.path, second.path, "--out", tmp_path / "out") == 2
    words = capsys.readouterr().err
    assert message.format(first.path) in words
    assert words.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_several_runs_need_a_place_and_one_is_not_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = of_seed(tmp_path, 0), of_seed(tmp_path, 1)
    for words in ((first.path, second.path), ("--out", tmp_path / "out")):
        assert reported(*words) == 2
        assert "or several runs and --out FOLDER" in capsys.readouterr().err
    assert reported(first.path) == 0
    assert "this policy" in capsys.readouterr().out, "one run stands for one policy"
