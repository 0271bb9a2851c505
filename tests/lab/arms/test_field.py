"""All arms play the experiment's instances; what follows from a policy uses its shapes, its actions and its budget."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.lab.evaluate import LoadedPolicy
from esper.lab.experiment import Experiment, run_arms, run_experiment
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationResult, evaluate_controllers
from esper.train.results import Arm
from esper.train.settings import TrainSettings
from esper.train.workers import Workers
from lab.arms.planting import planter
from train.runs import tiny

pytestmark = pytest.mark.landing

INSTANCES = 6
BASELINES = ["none", "random", "all_at_start", "schedule", "periodic", "heuristic", "look"]
FOLLOWERS = ["shuffled", "sequence", "static", "static_equal_flops", "none_equal_flops"]


@pytest.fixture(autouse=True)
def _planting_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny training learns to do nothing, of which nothing would follow."""

    def load(run: RunDirectory, settings: TrainSettings) -> LoadedPolicy:
        return LoadedPolicy(planter(), 1, f"checkpoint {settings.seed}")

    monkeypatch.setattr("esper.lab.experiment.load_policy", load)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiment")


def experiment(folder: Path) -> Experiment:
    found = Experiment(folder, {"plain": tiny("iterations=1")}, 2, INSTANCES)
    run_experiment(found, lambda *_: None)
    return found


def played(folder: Path) -> tuple[dict[str, Arm], list[str]]:
    """All arms, and what was shown as under way, once each."""
    shown: list[str] = []
    arms = run_arms(experiment(folder), lambda done, total, what: shown.append(what))
    return {arm.name: arm for arm in arms}, list(dict.fromkeys(shown))


def test_every_arm_plays_the_same_instances(trained: Path) -> None:
    arms, shown = played(trained)
    assert list(arms) == ["policy", *BASELINES, *FOLLOWERS]
    assert {name: len(arm.seeds) for name, arm in arms.items()} == {
        **dict.fromkeys(["policy", *FOLLOWERS], 2),
        **dict.fromkeys(BASELINES, 1),
    }
    names = [instance.name for instance in experiment(trained).sample_instances()]
    assert all([one.instance for one in records.outcomes] == names for arm in arms.values() for records in arm.seeds)
    assert shown[0] == "none"
    assert shown[-2:] == ["none_equal_flops, seed 1", ""]
    # What finding an arm took is counted.
    training = tiny("iterations=1").environments * get_suite("short").steps
    for name in ("policy", "sequence", "static"):
        assert [records.environment_steps for records in arms[name].seeds] == [training] * 2
    assert arms["none"].seeds[0].environment_steps == 0


def test_fixed_networks_have_the_policys_shapes_and_its_flops(trained: Path) -> None:
    arms, _ = played(trained)
    policy, static, equal, bare = (arms[name].seeds[0].outcomes for name in ("policy", *FOLLOWERS[2:]))
    grown = [one.added_parameters for one in policy]
    assert any(grown)
    assert [one.added_parameters for one in static] == [one.added_parameters for one in equal] == grown
    assert not any(one.added_parameters for one in bare)
    hosts = {one.instance: one.flops / get_suite("short").steps for one in arms["none"].seeds[0].outcomes}
    for own, whole, same, host in zip(policy, static, equal, bare, strict=True):
        per_step = whole.flops / get_suite("short").steps
        assert abs(same.flops - own.flops) <= per_step / 2
        assert abs(host.flops - own.flops) <= hosts[own.instance] / 2
    assert [one.score for one in static] != [one.score for one in policy]


def test_what_is_done_is_not_done_again_and_what_is_damaged_is(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms, _ = played(trained)
    files = {path: path.read_bytes() for path in trained.rglob("arms/*.json")}
    assert len(files) == len(BASELINES) + 2 * (1 + len(FOLLOWERS))
    bare, random = (trained / "plain" / "arms" / f"{name}.json" for name in ("none", "random"))
    bare.write_text("{")
    other = json.loads(random.read_text()) | {"cache_key": "of another time"}
    random.write_text(json.dumps(other))
    labels: list[str] = []

    def refuse(workers: Workers, controllers: Sequence[Controller], *given: Any) -> list[EvaluationResult]:
        assert not any(isinstance(one, LearnedController) for one in controllers), "a policy played again"
        return evaluate_controllers(workers, controllers, *given)

    monkeypatch.setattr("esper.lab.experiment.evaluate_controllers", refuse)
    again = run_arms(experiment(trained), lambda done, total, what: labels.append(what))
    assert {arm.name: arm for arm in again} == arms
    assert {path: path.read_bytes() for path in trained.rglob("arms/*.json")} == files


@pytest.mark.slow
def test_a_stop_costs_one_arm_of_one_seed_at_most(tmp_path: Path, trained: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if what == "static, seed 0":
            raise KeyboardInterrupt

    arms, _ = played(trained)
    again = tmp_path / "again"
    shutil.copytree(trained, again)
    for path in again.rglob("arms/*.json"):
        path.unlink()
    with pytest.raises(KeyboardInterrupt):
        run_arms(experiment(again), stop)
    done = sorted(path.stem for path in (again / "plain").rglob("arms/*.json"))
    assert done == sorted([*BASELINES, "policy", "policy", "shuffled", "sequence"])  # policies of both seeds play first
    assert played(again)[0] == arms
