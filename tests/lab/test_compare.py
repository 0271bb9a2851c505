"""Comparisons of ways to train: trainings share instances, take turns, and are resumable; all outputs agree."""

import json
from pathlib import Path

import pytest

from esper.cli import main
from esper.errors import ConfigError
from esper.lab.experiment import Experiment, Training, run_experiment
from esper.train.evaluation import evaluate_controllers
from esper.train.iteration import Iteration
from train.runs import TINY, tiny

pytestmark = pytest.mark.landing

Capture = pytest.CaptureFixture[str]


def unseen(done: int, total: int, training: Training, iteration: Iteration | None) -> None:
    """Progress that nobody watches."""


def experiment(folder: Path, seeds: int = 2, instances: int = 6) -> Experiment:
    arms = {"plain": tiny("iterations=1"), "sparse": tiny("iterations=1", "reward=sparse")}
    return Experiment(folder, arms, seeds, instances)


def test_arms_take_turns_at_going_first(tmp_path: Path) -> None:
    assert experiment(tmp_path).list_trainings() == [
        Training("plain", 0),
        Training("sparse", 0),
        Training("sparse", 1),
        Training("plain", 1),
    ]


def test_every_policy_plays_the_same_instances_and_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_experiment(experiment(tmp_path / "whole"), unseen)
    assert {arm.name: [len(one.outcomes) for one in arm.seeds] for arm in whole} == {"plain": [6, 6], "sparse": [6, 6]}
    stopped, seen = experiment(tmp_path / "stopped"), list[Training]()

    def stop(done: int, total: int, training: Training, iteration: Iteration | None) -> None:
        if iteration is not None and done == 2:
            raise KeyboardInterrupt

    def watch(done: int, total: int, training: Training, iteration: Iteration | None) -> None:
        if iteration is not None:
            seen.append(training)

    with pytest.raises(KeyboardInterrupt):
        run_experiment(stopped, stop)
    plays = list[int]()
    monkeypatch.setattr(
        "esper.lab.experiment.evaluate_controllers", lambda *given: (plays.append(1), evaluate_controllers(*given))[1]
    )
    again = run_experiment(stopped, watch)
    assert len(plays) == 2, "of the third, whose policy had not played, and the last"
    assert seen == [Training("plain", 1)], "the third had its checkpoint, the first two their scores"
    assert again == whole


def test_other_settings_in_the_same_place_are_refused(tmp_path: Path) -> None:
    run_experiment(experiment(tmp_path, seeds=1), unseen)
    changed = Experiment(tmp_path, {"plain": tiny("iterations=2"), "sparse": tiny("iterations=1")}, 1, 6)
    with pytest.raises(ConfigError, match="trained with other settings: choose another directory"):
        run_experiment(changed, unseen)


def test_an_arm_cannot_lead_out_of_its_folder_and_suites_do_not_mix(tmp_path: Path) -> None:
    for name in ("..", ".", "a/b", "", "a b"):
        with pytest.raises(ConfigError, match="an arm cannot be called"):
            Experiment(tmp_path, {name: tiny("suite=tokens"), "b": tiny("suite=tokens")}, 1, 6)
    with pytest.raises(ConfigError, match=r"different suites \(digits, tokens\)"):
        Experiment(tmp_path, {"a": tiny("suite=tokens"), "b": tiny("suite=digits")}, 1, 6)


def test_the_command_says_who_is_better(tmp_path: Path, capsys: Capture) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("iterations: 1\n")
    words = ["compare", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "--run-dir", str(tmp_path / "runs")]
    options = ["--seeds", "2", "--instances", "6", "--json", *(word for one in TINY for word in ("--set", one))]
    assert main([*words, *options]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["verdict"] == "b: too few seeds to say"
    first, second = record["configurations"]["standings"]
    assert (first["name"], second["name"], record["configurations"]["reference"]) == ("a", "b", "a")
    compared = ("difference", "difference_interval", "p", "probability_of_improvement", "verdict")
    assert [second[key] for key in compared] == [0, None, None, 0.5, "too few seeds to say"]
    assert first["score"] == second["score"]
    assert first["flops"] > 0
    assert "b: too few seeds to say, a minus b 0.000" in captured.err
    assert record["arms"] is None


def test_one_configuration_can_be_held_against_all_arms(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.yaml").write_text("iterations: 1\n")
    runs = tmp_path / "runs"
    words = ["compare", str(tmp_path / "a.yaml"), "--arms", "--run-dir", str(runs), "--seeds", "1"]
    options = ["--instances", "4", "--json", *(word for one in TINY for word in ("--set", one))]
    assert main([*words, *options]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    policy, *others = record["arms"]["standings"]
    assert (policy["name"], policy["verdict"], policy["environment_steps"]) == ("policy", None, 64)
    assert {one["name"] for one in others} >= {"none", "shuffled", "sequence", "static", "none_equal_flops"}
    assert {one["verdict"] for one in others} == {"too few seeds to say"}
    assert {one["p"] for one in others} == {None}
    assert "none: too few seeds to say" in record["verdict"]
    assert "none: too few seeds to say, policy minus none" in captured.err
    page = (runs / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "All arms" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml"], "nothing to compare: give two or more"),
        (["a.yaml", "a.yaml", "--seeds", "0"], "at least 1 seed and 2 instances"),
        (["a.yaml", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("iterations: 1\n")
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err
