"""Episodes with accidents, caps and early ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.control.observation import GLOBAL_FEATURES
from esper.lifecycle.actions import Op, action, wait
from esper.lifecycle.stages import Stage
from esper.rl.conduct import Conduct
from esper.rl.episodes import Episodes, StepResult
from esper.rl.rewards import RewardSettings
from esper.tasks.data import Data, Part
from esper.tasks.instance import Instance
from esper.training.budget import Budget
from esper.training.governor import GovernorSettings
from rl.short import QUICK, ShortSuite, instances, play

ILL = 1
GOVERNED = Conduct()
SINGLE = Conduct(governor=GovernorSettings(max_rollbacks=0))


class SpoiltSuite(ShortSuite):
    """One instance's training data hold a number that is none."""

    def __init__(self, spoilt: Instance) -> None:
        super().__init__()
        self._spoilt = spoilt

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        found = super().data(instance, part, phase)
        if instance != self._spoilt or part != "train":
            return found
        inputs = found.inputs.clone()
        inputs[::10, 0, 0] = torch.nan
        return replace(found, inputs=inputs)


def spoilt(conduct: Conduct = GOVERNED, reward: str = "outcome", count: int = 3) -> Episodes:
    chosen = instances(count)
    rewards = [RewardSettings(mode=reward)] * count
    return Episodes(SpoiltSuite(chosen[ILL]), chosen, QUICK, conduct, rewards=rewards)


def totals(results: Sequence[StepResult]) -> np.ndarray:
    return np.sum([result.reward for result in results], axis=0)


def test_data_that_are_not_numbers_end_the_episode_in_its_last_good_state() -> None:
    running = spoilt()
    results = play(running)
    incidents = [one for result in results for one in result.incidents]
    assert {one.environment for one in incidents} == {ILL}
    assert {one.trouble for one in incidents} == {"not_finite"}
    assert len(incidents) == 4, "three rollbacks, and the one that ends the episode"
    assert [one.ended for one in incidents] == [False, False, False, True]
    assert all(np.isnan(one.loss_before) and np.isfinite(one.loss_after) for one in incidents)
    assert [bool(result.finished[ILL]) for result in results].index(True) < len(results) - 1
    assert np.isfinite(running.final_score().score).all()
    assert running.population.host.values.isfinite().all()


def test_without_a_governor_the_network_is_lost_and_no_other() -> None:
    running = spoilt(Conduct(governor=None))
    results = play(running)
    assert not any(result.incidents for result in results)
    lost = [bool(row.isnan().any()) for row in running.population.host.values]
    assert lost == [False, True, False]


def test_a_learning_rate_that_explodes_ends_the_episode_in_its_last_good_state() -> None:
    chosen = instances(3)
    chosen[ILL] = replace(chosen[ILL], learning_rate=1e30)
    running = Episodes(ShortSuite(), chosen, QUICK)
    results = play(running)
    assert {one.environment for result in results for one in result.incidents} == {ILL}
    assert running.finished.all()
    assert running.population.host.values.isfinite().all()


@pytest.mark.parametrize("reward", ["outcome", "sparse"])
def test_every_trouble_costs_its_penalty_and_nothing_else_is_lost(reward: str) -> None:
    running = spoilt(reward=reward)
    results = play(running)
    troubles = np.zeros(running.size)
    for result in results:
        for one in result.incidents:
            troubles[one.environment] += 1
    np.testing.assert_allclose(totals(results), running.potential - 0.1 * troubles, atol=1e-9)


def test_neighbours_do_not_notice() -> None:
    chosen = instances(3)
    ill, well = spoilt(), Episodes(ShortSuite(), chosen, QUICK)
    for one, other in zip(play(ill), play(well), strict=True):
        for network in (0, 2):
            assert one.reward[network] == other.reward[network]
            assert one.evaluation.loss[network] == other.evaluation.loss[network]
    assert torch.equal(ill.population.host.values[[0, 2]], well.population.host.values[[0, 2]])


def test_seeds_are_pruned_into_their_cooldown_and_the_controller_sees_it() -> None:
    running = spoilt()
    germinate = np.stack([action(Op.GERMINATE, 0, 0)] * 3)
    result = running.step(germinate)
    assert result.incidents[0].pruned == (0,)
    assert running.population.table.stage[ILL, 0] == Stage.PRUNED
    assert (ILL, Stage.GERMINATED, Stage.PRUNED) in list(
        zip(result.transitions.env, result.transitions.before, result.transitions.after, strict=True)
    )
    observation = running.observe()
    assert len(np.unique(observation.globals[:, _feature("rollbacks")])) == 2
    assert observation.globals.isfinite().all()


def _feature(name: str) -> int:
    return [feature.name for feature in GLOBAL_FEATURES].index(name)


def test_an_ended_episode_rests_until_it_is_restarted() -> None:
    running = spoilt(SINGLE)
    running.step(wait(3))
    assert running.finished.tolist() == [False, True, False]
    host, score = running.population.host.values[ILL].clone(), running.final_score()
    masks = running.legal_actions()
    assert masks.op[ILL].tolist() == [True, False, False, False, False, False]
    assert masks.op[0].sum() > 1
    result = running.step(np.stack([action(Op.GERMINATE, 0, 0)] * 3))  # not even read where the episode has ended
    assert result.reward[ILL] == 0
    assert result.running.tolist() == [True, False, True]
    assert running.population.table.stage[:, 0].tolist() == [Stage.GERMINATED, Stage.DORMANT, Stage.GERMINATED]
    assert torch.equal(running.population.host.values[ILL], host)
    assert running.final_score().score[ILL] == score.score[ILL]
    assert running.step_index.tolist() == [2, 1, 2]
    healthy = instances(5)[4]
    running.restart(np.array([ILL]), [healthy])
    assert not running.finished.any()
    running.step(wait(3))
    assert running.step_index.tolist() == [3, 1, 3]
    assert not torch.equal(running.population.host.values[ILL], host)


def test_a_plateau_ends_an_episode_unless_a_seed_is_unfinished() -> None:
    conduct = Conduct(governor=None, plateau=3)
    chosen = [replace(one, learning_rate=1e-12, drift_step=None) for one in instances(2)]
    running = Episodes(ShortSuite(), chosen, QUICK, conduct)
    running.step(np.stack([*wait(1), action(Op.GERMINATE, 0, 0)]))
    results = [running.step(wait(2)) for _ in range(4)]
    assert [result.finished.tolist() for result in results] == [[False, False], *[[True, False]] * 3]
    assert running.step_index.tolist() == [3, 5]


def test_without_a_plateau_set_episodes_go_to_their_horizon() -> None:
    chosen = [replace(one, learning_rate=1e-12, drift_step=None) for one in instances(2)]
    running = Episodes(ShortSuite(), chosen, QUICK)
    assert len(play(running)) == ShortSuite.steps


def test_caps_hold_in_episodes() -> None:
    running = Episodes(ShortSuite(), instances(6), QUICK, Conduct(budget=Budget(parameters=120)))
    seen = [running.observe().globals[:, _feature("budget_left")]]
    while not running.finished.all():
        play(running, steps=1)
        assert (running.population.parameters_in(running.population.table.owning) <= 120).all()
        seen.append(running.observe().globals[:, _feature("budget_left")])
    left = torch.stack(seen)
    assert (left[0] == 1).all()
    assert left.min() < 0.5
