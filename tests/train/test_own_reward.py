"""Rewards of a run: one that a user's file registers is known to whatever reads the run, and mixes are refused."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from esper.errors import ConfigError
from esper.rl import ENVIRONMENT as GROWTH
from esper.rl.rewards import MODES, RewardInputs, RewardSettings, register_reward
from esper.runs.events import EpisodeStarted, StepTaken, decode_event
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import get_suite
from esper.train.trainer import ShardTask, collect_rollout, create_policy
from esper.train.workers import Shared
from train.runs import ENVIRONMENT, TINY, short_suite, started, tiny

CODE = """
import numpy as np
from esper.rl import register_reward
from esper.tasks.registry import register
from esper.tasks.token_suite import TokenSuite

@register_reward("flat")
def pay_flat(inputs, settings):
    return {"flat": np.full(len(inputs.finished), 0.25)}

@register
class Mine(TokenSuite):
    name = "mine"
    steps = 12
    batches_per_step = 1
    batch_size = 8
    validation_size = 16
    test_size = 16
"""


def esper(*words: str, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "esper", *words],
        check=False,
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "ESPER_SUITES": str(file)},
    )


def test_one_function_is_all_that_a_reward_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.rl.rewards.MODES", dict(MODES))

    @register_reward("toy")
    def pay_toy(inputs: RewardInputs, settings: RewardSettings) -> dict[str, np.ndarray]:
        return {"toy": np.where(inputs.acted, 0.5, 0.25)}

    with short_suite():
        envs = gymnasium.make_vec(GROWTH, num_envs=2, suite="short", reward="toy")
        envs.reset(seed=0)
        assert envs.step(np.zeros((2, 8), np.int64))[1].tolist() == [0.25, 0.25]
        iterations = []
        with started(tmp_path / "run", tiny("reward=toy", "iterations=1")) as trainer:
            trainer.train(iterations.append)
        steps = get_suite("short").steps
        (iteration,) = iterations
        assert 0.25 * steps / 2 < iteration.figures["ppo/return_mean"] < 0.5 * steps, "mean of what is still to come"
        with pytest.raises(ConfigError, match="unknown reward mode 'toyy', did you mean 'toy'.*outcome,.*, toy;"):
            tiny("reward=toyy")


@pytest.mark.slow
def test_two_shards_are_paid_by_it_and_the_run_is_evaluated(tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(CODE)
    settings = (*TINY[1:], "suite=mine", "reward=flat", "shards=2", "iterations=1", "probe_instances=2")
    assignments = [word for one in settings for word in ("--set", one)]
    trained = esper("train", "--run-dir", str(run), *assignments, file=file)
    assert trained.returncode == 0, trained.stderr
    with RunReader.open(RunDirectory(run).store) as reader:
        ((_, mean),) = reader.series("ppo/return_mean")
    assert mean > 1, "twelve quarters are paid; accuracy less rent, the default, is below 1"
    evaluated = esper("evaluate", str(run), "--instances", "2", file=file)
    assert evaluated.returncode == 0, evaluated.stderr
    file.write_text(CODE.replace("return {", "return 0 and {"))
    broken = esper("train", "--run-dir", str(tmp_path / "broken"), *assignments, file=file)
    assert broken.returncode != 0
    assert "reward mode 'flat' must give its terms by name" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_the_reward_of_every_network_is_on_record_and_paid_in_every_shard() -> None:
    """Those of the second shard too, whose networks are numbered from the first's on."""
    settings = tiny("reward={mode: shaped, progress: 0.2, shock: 0}", "shards=2")
    weights = Shared(create_policy(settings).state_dict())
    for shard in range(2):
        collected = collect_rollout(ShardTask(settings, 0, shard, weights))
        events = [decode_event(row.type, row.version, row.payload) for row in collected.events]
        started = [event for event in events if isinstance(event, EpisodeStarted)]
        assert [(event.environment, event.reward) for event in started] == [
            (4 * shard + row, "shaped") for row in range(4)
        ]
        paid = [event for event in events if isinstance(event, StepTaken) and "progress" in event.terms]
        assert {event.environment // 4 for event in paid} == {shard}


def test_a_policy_does_not_learn_from_a_mix_of_rewards() -> None:
    with pytest.raises(ConfigError, match="a policy does not observe which of several rewards it is paid"):
        tiny("reward=[outcome, sparse]")
