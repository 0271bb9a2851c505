"""An evaluation plays everyone on the same new instances, and its file has the measurements."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from esper.config.loading import load_settings
from esper.control.learned import POLICY, SAMPLED, UNTRAINED, restore_policy
from esper.control.rules import SHUFFLED, LookRule, LookSettings, Replay
from esper.errors import CheckpointError, ConfigError, RunError
from esper.lab.evaluate import (
    Behaviour,
    PlaySettings,
    evaluate_by_name,
    evaluate_run,
    load_policy,
    read_behaviour,
    sample_for_evaluation,
)
from esper.lifecycle.rules import Rules
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationConfig, create_baselines, evaluate_controllers, make_evaluation_config
from esper.train.results import Result, read_evaluation, select_split
from esper.train.settings import TrainSettings
from esper.train.trainer import create_controller
from esper.train.workers import LocalWorkers
from train.runs import ignore, started, tiny

pytestmark = pytest.mark.landing

HELDOUT, TRANSFER = 8, 3
Found = tuple[list[Result], Behaviour]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    path = tmp_path_factory.mktemp("evaluate") / "run"
    with started(
        path,
        tiny("iterations=1", "policy.advice=null", "policy.op_prior={wait: 0, germinate: 2, fossilize: 2, prune: 0}"),
    ) as trainer:
        trainer.train(ignore)
    return RunDirectory.open(path)


OF_POLICY = [POLICY, UNTRAINED, SAMPLED, SHUFFLED]
"""The arms in which the policy plays, or its actions."""


@pytest.fixture(scope="module")
def progress() -> list[tuple[int, int, str]]:
    return []


@pytest.fixture(scope="module")
def found(run: RunDirectory, progress: list[tuple[int, int, str]]) -> Found:
    with LocalWorkers(1) as workers:
        return evaluate_run(run, workers, HELDOUT, TRANSFER, lambda *step: progress.append(step))


def test_everyone_plays_the_same_instances_of_each_split(found: Found):
    names = [*OF_POLICY, *(controller.name for controller in create_baselines(get_suite("short")))]
    for split, count in (("heldout", HELDOUT), ("transfer", TRANSFER)):
        results = select_split(found[0], split)
        played = {name: [one.instance for one in results if one.controller == name] for name in names}
        assert {one.controller for one in results} == set(names)
        assert all(instances == played["policy"] for instances in played.values())
        assert len(set(played["policy"])) == count
    suite = get_suite("short")
    same = [sample_for_evaluation(suite, "heldout", 5, seed) for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2], "instances follow from the run's seed"
    assert all(one.seed >= 2**30 for one in same[0])  # training draws its seeds below
    assert all(one.family in suite.families for one in same[0])
    # Without an instance nobody plays.
    with LocalWorkers(1) as workers:
        assert evaluate_controllers(workers, [], EvaluationConfig("tokens", Rules()), []) == []


def test_the_file_holds_test_accuracy_less_rent_per_controller_and_instance(
    run: RunDirectory, found: Found, progress: list[tuple[int, int, str]]
):
    records = json.loads(run.evaluation.read_text())
    assert len(records) == (HELDOUT + TRANSFER) * (len(OF_POLICY) + len(create_baselines(get_suite("short"))))
    assert {"controller", "instance", "score", "test_accuracy", "added_parameters"} <= records[0].keys()
    assert read_evaluation(run.evaluation) == found[0]
    none = [one for one in found[0] if one.controller == "none"]
    assert all(one.score == one.test_accuracy and one.added_parameters == 0 for one in none)
    grown = [one for one in found[0] if one.added_parameters]
    assert grown
    assert all(one.score < one.test_accuracy for one in grown)
    # Progress was reported.
    total = 2 * (len(OF_POLICY) + len(create_baselines(get_suite("short"))))
    assert list(dict.fromkeys(done for done, _, _ in progress)) == list(range(total + 1))
    assert {most for _, most, _ in progress} == {total}
    parts = ["policy and baselines, in cohorts", "shuffled, in cohorts"]
    assert list(dict.fromkeys(what for _, _, what in progress)) == parts


@pytest.mark.parametrize("name", [UNTRAINED, SAMPLED])
def test_untrained_has_the_first_weights_and_sampled_draws_its_choices(run: RunDirectory, found: Found, name: str):
    """By hand: the policy of the first checkpoint, or the newest one with random choices, plays once more."""
    settings = load_settings(TrainSettings, run.config)
    checkpoints = Checkpoints(run.checkpoints)
    checkpoint = checkpoints.load(0) if name == UNTRAINED else checkpoints.latest()
    policy, trained = (
        restore_policy(one.tensors, settings.policy, settings.promise, settings.rules)
        for one in (checkpoint, checkpoints.latest())
    )
    policy.normaliser = trained.normaliser
    controller = create_controller(policy, settings, greedy=name == UNTRAINED)
    instances = sample_for_evaluation(get_suite("short"), "heldout", HELDOUT, settings.seed)
    with LocalWorkers(1) as workers:
        (played,) = evaluate_controllers(workers, [controller], make_evaluation_config(settings), instances)
    scores = [one.score for one in select_split(found[0], "heldout") if one.controller == name]
    assert [one.score for one in played.records] == pytest.approx(scores)
    assert scores != [one.score for one in select_split(found[0], "heldout") if one.controller == POLICY]


def test_shuffled_is_the_policys_actions_on_other_instances(run: RunDirectory, found: Found):
    """By hand: the policy is played once more, and its actions are handed on."""
    settings = tiny("policy.advice=null")
    policy = load_policy(run, settings).controller
    chosen = sample_for_evaluation(get_suite("short"), "heldout", HELDOUT, settings.seed)
    with LocalWorkers(1) as workers:
        actions = evaluate_controllers(workers, [policy], make_evaluation_config(settings), chosen)[0].logs[0].actions
        scores = {
            donor: evaluate_controllers(
                workers,
                [Replay({one.seed: actions[:, donor] for one in chosen})],
                make_evaluation_config(settings),
                chosen,
            )[0].records
            for donor in range(HELDOUT)
        }
    results = [one for one in select_split(found[0], "heldout") if one.controller == SHUFFLED]
    assert [one.instance for one in results] == [one.name for one in chosen]
    fits = np.array(
        [[abs(one.score - scores[donor][place].score) < 1e-6 for donor in scores] for place, one in enumerate(results)]
    )
    assert fits.sum() < 0.75 * fits.size, "the donors' actions must lead to scores that tell them apart"
    np.fill_diagonal(fits, val=False)
    places, donors = linear_sum_assignment(fits, maximize=True)
    assert fits[places, donors].all(), "everybody's actions were handed on once, to somebody else"


def test_baselines_score_as_when_played_alone(run: RunDirectory, found: Found):
    settings = tiny()
    controller = create_baselines(get_suite("short"))[-1]
    with LocalWorkers(1) as workers:
        instances = sample_for_evaluation(get_suite("short"), "heldout", HELDOUT, settings.seed)
        alone = evaluate_controllers(workers, [controller], make_evaluation_config(settings), instances)[0].records
    results = select_split(found[0], "heldout")
    together = [one.score for one in results if one.controller == controller.name]
    assert together == [one.score for one in alone]


def test_the_behaviour_agrees_with_the_results(run: RunDirectory, found: Found):
    behaviour = read_behaviour(run.behaviour)
    assert behaviour == found[1]
    assert behaviour.iteration == 1
    suite = get_suite("short")
    assert [one.family for one in behaviour.usage] == [*sorted(suite.families), *sorted(suite.transfer_families)]
    assert sum(one.episodes for one in behaviour.usage) == HELDOUT + TRANSFER
    for one in behaviour.usage:
        assert sum(one.operations.values()) == pytest.approx(1)
        assert all(plant.kept <= plant.germinated for plant in one.plants)
        # Every germination was a decision, and nothing germinates otherwise.
        germinated = sum(plant.germinated for plant in one.plants)
        assert germinated == pytest.approx(one.operations["germinate"] * suite.steps)
    assert any(one.plants for one in behaviour.usage)


def test_an_episode_of_each_family_is_kept(found: Found):
    scores = {one.instance: one.score for one in found[0] if one.controller == POLICY}
    episodes = found[1].episodes
    assert len({one.family for one in episodes}) == len(episodes) == len(found[1].usage)
    for one in episodes:
        assert one.score == scores[one.instance]
        assert len(one.accuracy) == get_suite("short").steps
        assert all(0 <= change.step < len(one.accuracy) for change in one.changes)
        assert (one.growth > 0) == any(change.after == "fossilized" for change in one.changes)


@pytest.mark.parametrize(("heldout", "transfer"), [(1, 0), (0, 4), (4, 1)])
def test_too_few_instances_are_refused_before_anything_is_played(run: RunDirectory, heldout: int, transfer: int):
    with LocalWorkers(1) as workers, pytest.raises(ConfigError, match="cannot give an interval: give at least 2"):
        evaluate_run(run, workers, heldout, transfer)


def test_without_transfer(tmp_path: Path):
    with started(tmp_path / "run", tiny("iterations=1")) as trainer, LocalWorkers(1) as workers:
        trainer.run.verdicts.write_text("those of an earlier evaluation")
        found = evaluate_run(trainer.run, workers, 2, 0)
    assert {one.split for one in found[0]} == {"heldout"}
    assert not trainer.run.verdicts.exists(), "they are not about the new results"


def test_a_policy_of_other_sizes_and_a_run_without_checkpoints_are_refused(tmp_path: Path):
    with started(tmp_path / "run", tiny()) as trainer, started(tmp_path / "other", tiny("policy.hidden=8")) as other:
        Checkpoints(trainer.run.checkpoints).save(1, other.learner.state_tensors(), {})
        with LocalWorkers(1) as workers, pytest.raises(CheckpointError):
            evaluate_run(trainer.run, workers, 2, 0)
        for file in trainer.run.checkpoints.iterdir():
            file.unlink()
        with LocalWorkers(1) as workers, pytest.raises(CheckpointError, match="no usable checkpoint"):
            evaluate_run(trainer.run, workers, 2, 0)


@pytest.mark.parametrize("read", [read_evaluation, read_behaviour])
def test_missing_and_damaged_files_are_refused(tmp_path: Path, read: Callable[[Path], object]):
    path = tmp_path / "evaluation.json"
    with pytest.raises(RunError, match="make it with `esper evaluate"):
        read(path)
    for content in ("", "{}", '[{"controller": "policy"}]', "[1]"):
        path.write_text(content)
        with pytest.raises(RunError, match="recreate it with `esper evaluate"):
            read(path)


def test_a_policy_is_advised_by_the_time_of_the_suite_that_it_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path / "run", tiny("iterations=1")) as trainer:
        trainer.train(ignore)
    horizons: list[int] = []

    def make_rule(settings: LookSettings, horizon: int) -> LookRule:
        horizons.append(horizon)
        return LookRule(settings, horizon)

    monkeypatch.setattr("esper.train.trainer.LookRule", make_rule)
    digits = get_suite("digits")
    with LocalWorkers(1) as workers:
        play = PlaySettings(controller=str(tmp_path / "run"), suite=digits.name, split="heldout", instances=2, seed=0)
        found = evaluate_by_name(play, workers)
    assert found.reference.name == POLICY
    assert set(horizons) == {digits.steps}
