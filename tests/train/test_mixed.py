"""Training on several suites at once, and from a policy that others trained."""

import json
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.control.controller import get_promise_settings
from esper.control.learned import POLICY
from esper.errors import ConfigError
from esper.lab.evaluate import count_trainings, find_controller
from esper.rl.rollout import Rollout, concatenate_by_shape
from esper.runs.events import EpisodeStarted
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints
from esper.tasks.registry import get_suite
from esper.train.settings import TrainSettings
from esper.train.trainer import ShardTask, Trainer, collect_rollout, create_policy
from esper.train.workers import Shared
from train.runs import ignore, resumed, short_suite, started, tiny

pytestmark = pytest.mark.landing


MIXED = ("suite=tokens", "seed=1", "mix=[generated]", "shards=2", "iterations=2", "checkpoint_every=1", "probe_every=2")


def press_ctrl_c(_: object) -> None:
    raise KeyboardInterrupt


def test_a_mixed_run_learns_from_all_and_goes_on_bit_exactly(tmp_path: Path) -> None:
    with started(tmp_path / "whole", tiny(*MIXED)) as trainer:
        before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
        trainer.train(ignore)
        whole = trainer.learner.state_tensors()
    assert any(not torch.equal(before[name], value) for name, value in trainer.policy.state_dict().items())
    with started(tmp_path / "cut", tiny(*MIXED)) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train(press_ctrl_c)
    with resumed(tmp_path / "cut") as trainer:
        assert trainer.done == 1
        trainer.train(ignore)
        again = trainer.learner.state_tensors()
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    assert_only_the_runs_own_suite_is_told_of(trainer)


def assert_only_the_runs_own_suite_is_told_of(trainer: Trainer) -> None:
    drawn = [[trainer.settings.draw_suite(iteration, shard) for shard in range(2)] for iteration in range(2)]
    with RunReader.open(trainer.run.store) as reader:
        recorded = [(event.iteration, event.environment) for event in reader.events(EpisodeStarted)]
    own = [
        (iteration + 1, shard * 4 + row)
        for iteration, names in enumerate(drawn)
        for shard, name in enumerate(names)
        for row in range(4)
        if name == "tokens"
    ]
    assert sorted(recorded) == own
    assert 0 < len(own) < 2 * 8


def rollouts(settings: TrainSettings) -> list[Rollout]:
    weights = Shared(create_policy(settings).state_dict())
    tasks = [ShardTask(settings, 0, shard, weights) for shard in range(settings.shards)]
    return [collect_rollout(task).rollout for task in tasks]


def test_rollouts_of_one_shape_are_joined() -> None:
    alike = concatenate_by_shape(rollouts(tiny("shards=2")))
    assert [one.environments for one in alike] == [8]
    mixed = tiny("shards=2", "seed=1", "mix=[generated]")
    assert mixed.draw_suite(0, 0) != mixed.draw_suite(0, 1)
    assert [one.environments for one in concatenate_by_shape(rollouts(mixed))] == [4, 4]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one iteration, from whose policy others start."""
    path = tmp_path_factory.mktemp("origin") / "run"
    with short_suite(), started(path, tiny("iterations=1")) as trainer:
        trainer.train(ignore)
    return path


@pytest.mark.parametrize("suite", ["tokens", "mnist1d_conv", "generated:11"])
def test_a_policy_plays_any_suite_by_its_name(origin: Path, suite: str) -> None:
    controller, terms = find_controller(str(origin), get_suite(suite))
    assert controller.name == POLICY
    assert terms.suite == suite
    assert get_promise_settings(controller) == tiny().promise


def test_a_run_starts_from_the_policy_of_another(origin: Path, tmp_path: Path) -> None:
    saved = Checkpoints(RunDirectory.open(origin).checkpoints).latest().tensors
    with started(tmp_path / "run", tiny(f"start_from={origin}", "seed=1")) as trainer:
        weights = trainer.policy.state_dict()
        assert weights
        assert all(torch.equal(saved[f"policy.{name}"], value) for name, value in weights.items())


def test_a_run_cannot_start_from_a_policy_of_another_kind(origin: Path, tmp_path: Path) -> None:
    start = f"start_from={origin}"
    with pytest.raises(ConfigError, match=r"the policy of .* has other settings \(hidden, width\): set"):
        started(tmp_path / "small", tiny(start, "policy.hidden=8", "policy.width=8")).__enter__()
    with pytest.raises(ConfigError, match=r"the policy of .* has no head for tempo, as its rules left one choice"):
        started(tmp_path / "wider", tiny(start, "rules.tempos=[3, 5]")).__enter__()
    with pytest.raises(ConfigError, match="no policy 'none': give the directory of a run of `esper train`"):
        started(tmp_path / "none", tiny("start_from='none'")).__enter__()


def test_a_start_that_is_none_leaves_no_run_behind(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--from", "esper"]) == 2
    assert "no policy 'esper': give the directory of a run of `esper train`" in capsys.readouterr().err
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--from", str(origin)]) == 2
    assert "has other settings" in capsys.readouterr().err
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--set", "ppo.bf16=true"]) == 2
    assert "the policy learns on cpu: set it to false" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_costs_begin_with_those_of_the_start(origin: Path, tmp_path: Path) -> None:
    suite = get_suite("short")
    assert count_trainings(str(origin), suite) == 8
    with started(
        tmp_path / "run", tiny(f"start_from={origin}", "ppo.no_growth_baseline=true", "iterations=1")
    ) as trainer:
        trainer.train(ignore)
    assert count_trainings(str(tmp_path / "run"), suite) == 8 + 8 + 2


def test_a_search_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "search", "--controller", "look", "--suite", "short", "--instances", "2", "--json"]
    with short_suite(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.commands.bench.WORKERS", 1)
        assert main(words) == 0
    output = capsys.readouterr()
    found = json.loads(output.out.splitlines()[-1])
    assert set(found["B"]) == {"random_search", "successive_halving"}
    assert "break_even" in found
    assert "successive_halving" in output.err
    assert main([*words[:-2], "1"]) == 2
    assert "1 instance cannot give an interval" in capsys.readouterr().err
