"""Twins wait beside the networks of their groups and disturb nobody."""

import numpy as np
import pytest
import torch

from esper.lifecycle.actions import make_wait_actions
from esper.rl.episodes import Episodes
from esper.rl.rollout import Rollout, concatenate_rollouts
from esper.tasks.registry import get_suite, suite_names
from esper.train.collect import ShardResult, ShardTask, collect_rollout, create_policy, sample_instances
from esper.train.evaluation import create_baselines, load_baseline_settings
from esper.train.settings import TrainSettings
from esper.train.workers import Shared
from train.runs import started, tiny

MODES = "reward=[outcome, shaped]"


def collected(settings: TrainSettings, shard: int = 0) -> ShardResult:
    task = ShardTask(settings, 0, shard, Shared(create_policy(settings).state_dict()))
    return collect_rollout(task)


def tensors(rollout: Rollout) -> list[torch.Tensor]:
    parts = (*rollout.observations, *rollout.masks, *rollout.state)
    return [*parts, rollout.actions, rollout.chosen_log_prob, rollout.value, rollout.reward, rollout.running]


def alone(settings: TrainSettings, environment: int) -> np.ndarray:
    """What the environment's network earns if it only waits, with nobody beside it."""
    rewards = [settings.reward[environment // settings.ppo.group % len(settings.reward)].at_progress(0.0)]
    shard, row = divmod(environment, settings.environments // settings.shards)
    instance = sample_instances(settings, 0, shard)[row]
    episodes = Episodes(get_suite(settings.suite), [instance], settings.rules, settings.conduct, rewards=rewards)
    return np.stack([episodes.step(make_wait_actions(1)).reward[0] for _ in range(episodes.suite.steps)])


@pytest.mark.landing
def test_twins_change_nothing_but_what_is_known_of_them() -> None:
    plain, beside = collected(tiny(MODES)), collected(tiny(MODES, "ppo.no_growth_baseline=true"))
    assert all(torch.equal(a, b) for a, b in zip(tensors(plain.rollout), tensors(beside.rollout), strict=True))
    assert np.array_equal(plain.log.objective, beside.log.objective)
    assert np.array_equal(plain.log.actions, beside.log.actions)
    assert not plain.rollout.control_variate.any()
    assert plain.baseline_steps == 0
    assert beside.baseline_steps == 2 * get_suite("short").steps


@pytest.mark.landing
@pytest.mark.parametrize("group", [1, 2])
def test_a_twin_earns_what_waiting_pays_on_the_groups_instance(group: int) -> None:
    settings = tiny(MODES, "ppo.no_growth_baseline=true", f"ppo.group={group}", "shards=2")
    rollout = concatenate_rollouts([collected(settings, shard).rollout for shard in range(2)])
    for environment in (0, 2, 5, 7):
        expected = torch.from_numpy(alone(settings, environment)).float()
        torch.testing.assert_close(rollout.control_variate[:, environment], expected, atol=1e-5, rtol=1e-4)
    assert rollout.control_variate.abs().max() > 0.01
    assert not torch.equal(rollout.control_variate[:, 0], rollout.control_variate[:, 4])


@pytest.mark.landing
def test_a_run_with_twins_learns_and_counts_their_steps(tmp_path) -> None:
    steps = get_suite("short").steps
    settings = tiny("iterations=1", "ppo.no_growth_baseline=true", "ppo.group=2")
    with started(tmp_path / "twins", settings) as trainer:
        reported = []
        trainer.train(reported.append)
        learned = trainer.learner.state_tensors()
    plain = settings.model_copy(update={"ppo": settings.ppo.model_copy(update={"no_growth_baseline": False})})
    with started(tmp_path / "plain", plain) as trainer:
        trainer.train(reported.append)
        other = trainer.learner.state_tensors()
    beside, without = reported
    assert without.environment_steps == 8 * steps
    assert beside.environment_steps == (8 + 4) * steps
    assert beside.objective == without.objective
    assert not torch.equal(learned["policy.value_head.returns.mean"], other["policy.value_head.returns.mean"])


# Every suite has the controllers that a policy is compared with.


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_has_baselines_that_fit_it(name: str) -> None:
    suite = get_suite(name)
    settings = load_baseline_settings(suite)
    places = [*settings.all_at_start, *settings.schedule, *settings.periodic.plantings, *settings.heuristic.preferences]
    assert all(slot < len(suite.sites) and kind < len(suite.blueprints) for slot, kind in places)
    assert [controller.name for controller in create_baselines(suite)] == [
        "none",
        "random",
        "all_at_start",
        "schedule",
        "periodic",
        "heuristic",
        "look",
    ]
