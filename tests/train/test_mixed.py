"""Training on several suites at once, and from a policy that others trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.config.loading import load_settings
from esper.control.controller import get_promise_settings
from esper.control.learned import PolicyOrigin
from esper.control.shipped import ESPER, open_policy
from esper.errors import ConfigError
from esper.lab.evaluate import count_trainings, find_controller
from esper.lifecycle.rules import Rules
from esper.rl.rollout import Rollout, concatenate_by_shape
from esper.runs.events import EpisodeStarted
from esper.runs.reader import RunReader
from esper.serialization.checkpoints import Checkpoints
from esper.tasks.registry import get_suite
from esper.train.collect import ShardTask, collect_rollout, create_policy
from esper.train.evaluation import load_shipped_policy
from esper.train.settings import TrainSettings
from esper.train.trainer import Trainer
from esper.train.workers import Shared
from train.runs import ignore, resumed, started, tiny
from train.short_suite import short_suite

pytestmark = pytest.mark.landing


@pytest.fixture(autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


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


SHIPPED = load_settings(PolicyOrigin, open_policy(ESPER).config)


def test_the_shipped_policy_is_small_whole_and_advised() -> None:
    run = open_policy(ESPER)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    newest = Checkpoints(run.checkpoints).latest()
    assert all(name.startswith("policy.") for name in newest.tensors), "the optimizer is not shipped"
    assert "@@" not in (run.path / "CARD.md").read_text()
    assert SHIPPED.policy.advice is not None
    assert SHIPPED.rules == Rules(), "baselines play by the default rules"
    settings = load_settings(TrainSettings, run.config)
    assert newest.iteration == settings.iterations, "trained to its end"


@pytest.mark.parametrize("suite", ["tokens", "mnist1d_conv", "generated:11"])
def test_it_plays_any_suite_by_its_name(suite: str) -> None:
    controller, terms = find_controller(ESPER, get_suite(suite))
    assert controller.name == ESPER
    assert terms.suite == suite
    assert get_promise_settings(controller) == SHIPPED.promise
    assert load_shipped_policy(get_suite(suite)).name == ESPER


def test_a_run_starts_from_it(tmp_path: Path) -> None:
    settings = load_settings(
        TrainSettings,
        None,
        ("suite=short", "environments=8", "shards=1", "ppo.group=4", "start_from=esper", "iterations=1"),
    )
    shipped = Checkpoints(open_policy(ESPER).checkpoints).latest().tensors
    with started(tmp_path / "run", settings) as trainer:
        weights = trainer.policy.state_dict()
        assert all(torch.equal(weights[name.removeprefix("policy.")], value) for name, value in shipped.items())
        trainer.train(ignore)
    with started(tmp_path / "on", tiny(f"start_from={tmp_path / 'run'}", *same_policy(settings))) as other:
        assert torch.equal(other.policy.state_dict()["value_head.body.bias"], weights["value_head.body.bias"])


def same_policy(settings: TrainSettings) -> tuple[str, ...]:
    return (f"policy.hidden={settings.policy.hidden}", f"policy.width={settings.policy.width}")


def test_a_run_cannot_start_from_a_policy_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the policy of esper has other settings \(hidden, width\): set"):
        started(tmp_path / "small", tiny("start_from=esper")).__enter__()
    wider = tiny("start_from=esper", "policy.hidden=128", "policy.width=64", "rules.tempos=[3, 5]")
    with pytest.raises(ConfigError, match="the policy of esper has no head for tempo, as its rules left one choice"):
        started(tmp_path / "wider", wider).__enter__()
    with pytest.raises(ConfigError, match="no controller 'espr'; did you mean 'esper'"):
        started(tmp_path / "none", tiny("start_from=espr")).__enter__()


def test_a_start_that_is_none_leaves_no_run_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--from", "espr"]) == 2
    assert "no controller 'espr'; did you mean 'esper'" in capsys.readouterr().err
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--from", "esper", "--set", "policy.hidden=32"]) == 2
    assert not (tmp_path / "run").exists()


def test_costs_begin_with_those_of_the_start(tmp_path: Path) -> None:
    suite = get_suite("short")
    shipped = count_trainings(ESPER, suite)
    assert shipped == 24 * 256
    settings = tiny(
        "start_from=esper", "ppo.no_growth_baseline=true", "iterations=1", "policy.hidden=128", "policy.width=64"
    )
    with started(tmp_path / "run", settings) as trainer:
        trainer.train(ignore)
    assert count_trainings(str(tmp_path / "run"), suite) == shipped + 8 + 2


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
    assert "1 instance can give no interval" in capsys.readouterr().err
