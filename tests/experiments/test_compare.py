"""Comparisons of ways to train: the statistics are calibrated, and trials are paired, in turns, and resumable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from esper.experiments.compare.judgement import Verdict, judge

from esper.cli import main
from esper.errors import ConfigError
from esper.experiments.compare.trials import Contest, Trial, run_contest, scores_of
from esper.experiments.iteration import Iteration
from esper.experiments.play import play
from experiments.runs import TINY, tiny
from experiments.short_suite import short_suite

Capture = pytest.CaptureFixture[str]
INSTANCES = 42
FAMILIES = [f"family {number % 7}" for number in range(INSTANCES)]


def drawn(rng: np.random.Generator, seeds: int, effects: dict[str, float], luck: float = 0.02) -> dict[str, np.ndarray]:
    """Scores of arms whose seeds differ by luck, on instances of different difficulty, with noise on each."""
    difficulty = rng.normal(0, 0.15, INSTANCES)
    return {
        name: 0.6 + effect + difficulty + rng.normal(0, luck, (seeds, 1)) + rng.normal(0, 0.08, (seeds, INSTANCES))
        for name, effect in effects.items()
    }


def verdicts(simulations: int, seeds: int, effects: dict[str, float]) -> list[Verdict]:
    rng = np.random.default_rng(0)
    return [judge(drawn(rng, seeds, effects), FAMILIES)[0].verdict for _ in range(simulations)]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [4, 5, 10])
def test_false_alarms_are_as_rare_as_stated(seeds: int) -> None:
    found = verdicts(1000, seeds, {"a": 0.0, "b": 0.0})
    assert sum(one is not Verdict.OPEN for one in found) <= 50 + 3 * np.sqrt(50)


def test_a_known_effect_is_found_in_the_right_direction() -> None:
    found = verdicts(60, 5, {"a": 0.0, "b": 0.08})
    assert found.count(Verdict.SECOND) >= 54
    assert Verdict.FIRST not in found


def test_many_instances_do_not_make_up_for_seeds() -> None:
    """Two lucky arms of the same kind: by instances alone the difference would be beyond doubt."""
    rng = np.random.default_rng(3)
    found = [judge(drawn(rng, 5, {"a": 0.0, "b": 0.0}, luck=0.1), FAMILIES)[0] for _ in range(40)]
    assert sum(one.verdict is not Verdict.OPEN for one in found) <= 5
    assert np.mean([one.difference.high - one.difference.low for one in found]) > 0.1


def test_the_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        difference = judge(drawn(rng, 6, {"a": 0.05, "b": 0.0}), FAMILIES)[0].difference
        covered += difference.low <= 0.05 <= difference.high
    assert covered >= 178


def test_the_interval_is_as_wide_with_few_seeds_as_it_must_be() -> None:
    """Resampling four seeds as they are would understate their variance by a quarter."""
    rng, ratios = np.random.default_rng(5), list[float]()
    for _ in range(60):
        by_seed = rng.normal(0, 0.02, (2, 4, 1)) + np.zeros(14)
        difference = judge({"a": by_seed[0], "b": by_seed[1]}, ["x"] * 14)[0].difference
        error = np.sqrt(by_seed[:, :, 0].var(axis=1, ddof=1).sum() / 4)
        ratios.append((difference.high - difference.low) / (2 * 1.96 * error))
    assert 0.95 < np.mean(ratios) < 1.05


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_too_few_seeds_say_nothing_however_large_the_difference(seeds: int) -> None:
    (pair,) = judge(drawn(np.random.default_rng(0), seeds, {"a": 0.0, "b": 0.5}), FAMILIES)
    assert pair.verdict is Verdict.TOO_FEW


def test_more_questions_need_more_seeds() -> None:
    arms = {"a": 0.0, "b": 0.5, "c": 0.5}
    assert {one.verdict for one in judge(drawn(np.random.default_rng(0), 4, arms), FAMILIES)} == {Verdict.TOO_FEW}
    pairs = judge(drawn(np.random.default_rng(0), 5, arms), FAMILIES)
    assert [(one.first, one.second) for one in pairs] == [("a", "b"), ("a", "c")]
    assert [one.verdict for one in pairs] == [Verdict.SECOND, Verdict.SECOND]


@pytest.mark.parametrize("seeds", [1, 5])
def test_identical_arms_do_not_differ(seeds: int) -> None:
    scores = drawn(np.random.default_rng(0), seeds, {"a": 0.0})
    (pair,) = judge({"a": scores["a"], "b": scores["a"].copy()}, FAMILIES)
    assert pair.words == "no difference shown"
    assert (pair.difference.estimate, pair.p, pair.probability_of_improvement) == (0, 1, 0.5)


def test_figures_of_a_pair_are_what_they_say() -> None:
    first = np.array([[0.5, 0.7], [0.6, 0.8], [0.9, 0.7], [0.6, 0.6]])
    second = first - 0.2
    (pair,) = judge({"a": first, "b": second}, ["x", "x"])
    assert pair.difference.estimate == pytest.approx(0.2)
    assert pair.middle_difference == pytest.approx(0.2)
    # Of the 16 pairs of seeds on the first instance, then on the second: wins and ties.
    assert pair.probability_of_improvement == pytest.approx(np.mean(first[:, None] > second[None]), abs=0.1)
    assert pair.mann_whitney_p <= 0.12


def test_scores_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="all arms play the same instances"):
        judge({"a": np.zeros((5, 3)), "b": np.zeros((4, 3))}, ["x"] * 3)


@pytest.fixture
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


def unseen(done: int, total: int, trial: Trial, iteration: Iteration | None) -> None:
    """Progress that nobody watches."""


def contest(folder: Path, seeds: int = 2, instances: int = 6) -> Contest:
    arms = {"plain": tiny("iterations=1"), "sparse": tiny("iterations=1", "reward=sparse")}
    return Contest(folder, arms, seeds, instances)


@pytest.mark.usefixtures("_short_suite")
def test_arms_take_turns_at_going_first(tmp_path: Path) -> None:
    assert contest(tmp_path).trials() == [
        Trial("plain", 0),
        Trial("sparse", 0),
        Trial("sparse", 1),
        Trial("plain", 1),
    ]


@pytest.mark.usefixtures("_short_suite")
def test_every_policy_plays_the_same_instances_and_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_contest(contest(tmp_path / "whole"), unseen)
    assert {name: scores_of(own).shape for name, own in whole.items()} == {"plain": (2, 6), "sparse": (2, 6)}
    stopped, seen = contest(tmp_path / "stopped"), list[Trial]()

    def stop(done: int, total: int, trial: Trial, iteration: Iteration | None) -> None:
        if iteration is not None and done == 2:
            raise KeyboardInterrupt

    def watch(done: int, total: int, trial: Trial, iteration: Iteration | None) -> None:
        if iteration is not None:
            seen.append(trial)

    with pytest.raises(KeyboardInterrupt):
        run_contest(stopped, stop)
    plays = list[int]()
    monkeypatch.setattr("esper.experiments.compare.judged_run.play", lambda *given: (plays.append(1), play(*given))[1])
    again = run_contest(stopped, watch)
    assert len(plays) == 2, "of the third, whose policy had not played, and the last"
    assert seen == [Trial("plain", 1)], "the third had its checkpoint, the first two their scores"
    assert again == whole


@pytest.mark.usefixtures("_short_suite")
def test_other_settings_in_the_same_place_are_refused(tmp_path: Path) -> None:
    run_contest(contest(tmp_path, seeds=1), unseen)
    changed = Contest(tmp_path, {"plain": tiny("iterations=2"), "sparse": tiny("iterations=1")}, 1, 6)
    with pytest.raises(ConfigError, match="trained with other settings: choose another --run-dir"):
        run_contest(changed, unseen)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "a b"])
def test_an_arm_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="an arm cannot be called"):
        Contest(tmp_path, {name: tiny("suite=tokens"), "b": tiny("suite=tokens")}, 1, 6)


def test_suites_do_not_mix(tmp_path: Path) -> None:
    arms = {"a": tiny("suite=tokens"), "b": tiny("suite=digits")}
    with pytest.raises(ConfigError, match=r"different suites \(digits, tokens\)"):
        Contest(tmp_path, arms, 1, 6)


@pytest.mark.usefixtures("_short_suite")
def test_the_command_says_who_is_better(tmp_path: Path, capsys: Capture) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("iterations: 1\n")
    words = ["compare", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "--run-dir", str(tmp_path / "runs")]
    options = ["--seeds", "2", "--instances", "6", "--json", *(word for one in TINY for word in ("--set", one))]
    assert main([*words, *options]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["verdict"] == "no difference shown"
    (pair,) = record["pairs"]
    assert (pair["first"], pair["second"], pair["difference"], pair["interval"]) == ("a", "b", 0, [0, 0])
    assert (pair["p"], pair["probability_of_improvement"]) == (1, 0.5)
    assert record["means"]["a"] == record["means"]["b"]
    assert record["means"]["a"]["flops"] > 0
    assert "no difference shown: a less b +0.000" in captured.err


@pytest.mark.usefixtures("_short_suite")
def test_one_configuration_can_be_held_against_all_arms(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.yaml").write_text("iterations: 1\n")
    runs = tmp_path / "runs"
    words = ["compare", str(tmp_path / "a.yaml"), "--arms", "--run-dir", str(runs), "--seeds", "1"]
    options = ["--instances", "4", "--json", *(word for one in TINY for word in ("--set", one))]
    assert main([*words, *options]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    policy, *others = record["arms"]
    assert (policy["name"], policy["verdict"], policy["environment_steps"]) == ("policy", None, 64)
    assert {one["name"] for one in others} >= {"none", "shuffled", "sequence", "static", "none_equal_flops"}
    asked = {"name", "score", "accuracy", "added", "flops", "difference", "interval", "p", "verdict"}
    assert all(asked | {"probability_of_improvement", "environment_steps"} == set(one) for one in record["arms"])
    assert {one["verdict"] for one in others} == {"too few seeds to say"}
    assert record["pairs"] == []
    assert "none: too few seeds to say" in record["verdict"]
    assert "none: too few seeds to say, policy less none" in captured.err
    assert (runs / "arms.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml"], "give two or more, or --arms"),
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
