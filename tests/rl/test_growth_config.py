"""Episodes with accidents, caps and early ends, and counterfactuals in turns."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.control.rules import Uniform
from esper.engine.engine import GrowthConfig
from esper.engine.governor import GovernorSettings
from esper.engine.observation import GLOBAL_FEATURES, SLOT_FEATURES
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.rules import Reason, Rules
from esper.lifecycle.table import Stage
from esper.population.evaluation import evaluate
from esper.population.parameters import SeedKind
from esper.rl.episodes import Episodes, StepResult
from esper.rl.rewards import RewardSettings
from esper.runs.events import RolledBack
from esper.tasks.instance import Data, Instance, Part
from esper.tasks.registry import get_suite
from esper.train.recorder import EpisodeRecorder
from open_rules import open_rules
from rl.short import QUICK, SUITE, ShortSuite, instances, play

ILL = 1
GOVERNED = GrowthConfig()
SINGLE = GrowthConfig(governor=GovernorSettings(max_rollbacks=0))


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


def spoilt(growth: GrowthConfig = GOVERNED, reward: str = "outcome", count: int = 3) -> Episodes:
    chosen = instances(count)
    rewards = [RewardSettings(mode=reward)] * count
    return Episodes(SpoiltSuite(chosen[ILL]), chosen, QUICK, growth, rewards=rewards)


def totals(results: Sequence[StepResult]) -> np.ndarray:
    return np.sum([result.reward for result in results], axis=0)


def play_recorded(running: Episodes) -> tuple[list[StepResult], list[RolledBack]]:
    """Let a random controller play to the end; the results, and the rollbacks as a run stores them."""
    recorder, controller = EpisodeRecorder(running), Uniform()
    state, results = controller.start([one.seed for one in running.instances]), list[StepResult]()
    while not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        results.append(running.step(actions))
        recorder.record_step(actions, results[-1])
    return results, recorder.log.rollbacks


def test_data_that_are_not_numbers_end_the_episode_in_its_last_good_state() -> None:
    running = spoilt()
    results, incidents = play_recorded(running)
    assert {one.environment for one in incidents} == {ILL}
    assert {one.trouble for one in incidents} == {"not_finite"}
    assert len(incidents) == 4, "three rollbacks, and the one that ends the episode"
    assert [one.ended for one in incidents] == [False, False, False, True]
    assert all(np.isnan(one.loss_before) and np.isfinite(one.loss_after) for one in incidents)
    assert [bool(result.finished[ILL]) for result in results].index(True) < len(results) - 1
    assert np.isfinite(running.final_score().score).all()
    assert running.population.host.values.isfinite().all()


def test_rollbacks_on_a_suite_about_the_loss_tell_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpoiltSuite, "objective", "loss")
    _, incidents = play_recorded(spoilt())
    assert len(incidents) == 4
    for one in incidents:
        assert one.metric_before == -1, "a loss that is no number is as bad as can be"
        assert one.metric_after == pytest.approx(1 - one.loss_after / np.log(SUITE.classes))


@pytest.mark.parametrize("reward", ["outcome", "sparse"])
def test_every_trouble_costs_its_penalty_and_nothing_else_is_lost(reward: str) -> None:
    running = spoilt(reward=reward)
    results = play(running)
    troubles = np.zeros(running.size)
    for result in results:
        troubles += result.intervention.rows
    np.testing.assert_allclose(totals(results), running.potential - 0.1 * troubles, atol=1e-9)


def test_seeds_are_pruned_into_their_cooldown_and_the_controller_sees_it() -> None:
    running = spoilt()
    germinate = np.stack([make_action(Op.GERMINATE, 0, 0)] * 3)
    result = running.step(germinate)
    assert (result.intervention.transitions.env, result.intervention.transitions.slot) == (ILL, 0)
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
    running.step(make_wait_actions(3))
    assert running.finished.tolist() == [False, True, False]
    host, score = running.population.host.values[ILL].clone(), running.final_score()
    masks = running.legal_actions()
    assert masks.op[ILL].tolist() == [True, False, False, False, False, False]
    assert masks.op[0].sum() > 1
    result = running.step(np.stack([make_action(Op.GERMINATE, 0, 0)] * 3))  # not even read where the episode has ended
    assert result.reward[ILL] == 0
    assert result.running.tolist() == [True, False, True]
    assert running.population.table.stage[:, 0].tolist() == [Stage.GERMINATED, Stage.DORMANT, Stage.GERMINATED]
    assert torch.equal(running.population.host.values[ILL], host)
    assert running.final_score().score[ILL] == score.score[ILL]
    assert running.step_index.tolist() == [2, 1, 2]
    healthy = instances(5)[4]
    running.restart(np.array([ILL]), [healthy])
    assert not running.finished.any()
    running.step(make_wait_actions(3))
    assert running.step_index.tolist() == [3, 1, 3]
    assert not torch.equal(running.population.host.values[ILL], host)


def test_a_plateau_ends_an_episode_unless_a_seed_is_unfinished() -> None:
    growth = GrowthConfig(governor=None, plateau=3)
    chosen = [replace(one, learning_rate=1e-12, drift_step=None) for one in instances(2)]
    running = Episodes(ShortSuite(), chosen, QUICK, growth)
    running.step(np.stack([*make_wait_actions(1), make_action(Op.GERMINATE, 0, 0)]))
    results = [running.step(make_wait_actions(2)) for _ in range(4)]
    assert [result.finished.tolist() for result in results] == [[False, False], *[[True, False]] * 3]
    assert running.step_index.tolist() == [3, 5]


SLOTS = len(SUITE.sites)
MLP, CONV = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("token_conv")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def episodes(chosen: Sequence[Instance], every: int, rules: Rules = QUICK, reward: str = "outcome") -> Episodes:
    growth = GrowthConfig(governor=None, counterfactual_every=every)
    return Episodes(SUITE, chosen, rules, growth, rewards=[RewardSettings(mode=reward)] * len(chosen))


def plant(running: Episodes, slot: int, blueprint: int = MLP) -> StepResult:
    """Germinate in one slot of every network."""
    return running.step(np.stack([make_action(Op.GERMINATE, slot, blueprint)] * running.size))


def ages(running: Episodes) -> list[list[int]]:
    return running.population.measurements.contribution_age.tolist()


def feature(running: Episodes, name: str) -> np.ndarray:
    return running.observe().slots[..., [one.name for one in SLOT_FEATURES].index(name)].numpy()


def due(step: int, every: int) -> list[bool]:
    return [(step + slot) % every == 0 for slot in range(SLOTS)]


def test_slots_take_turns_and_the_last_measurement_stands() -> None:
    every, running = 3, episodes(instances(2), 3)
    results = [plant(running, slot) for slot in range(SLOTS)] + [running.step(make_wait_actions(2)) for _ in range(7)]
    for step, (before, result) in enumerate(zip([None, *results], results, strict=False)):
        found = result.evaluation
        assert found.fresh.tolist() == [due(step, every)] * 2
        if before is None or step < SLOTS:
            continue
        stood = ~found.fresh
        for name in ("accuracy_contribution", "loss_contribution"):
            now, then = vars(found)[name], vars(before.evaluation)[name]
            np.testing.assert_array_equal(now[stood], then[stood])
        assert (found.loss_contribution[found.fresh] != before.evaluation.loss_contribution[found.fresh]).all()
    assert np.isfinite(results[-1].evaluation.loss_contribution).all()


def test_what_is_measured_is_what_is_true_now() -> None:
    running = episodes(instances(4), 2)
    for slot in range(SLOTS):
        plant(running, slot)
    for _ in range(4):
        found = running.step(make_wait_actions(4)).evaluation
        truth = evaluate(running.population, running.validation)
        np.testing.assert_allclose(found.loss, truth.loss, **TOLERANCE)
        np.testing.assert_allclose(
            found.loss_contribution[found.fresh], truth.loss_contribution[found.fresh], **TOLERANCE
        )


def test_every_decision_measures_everything_by_default() -> None:
    running, seeds = Episodes(SUITE, instances(4), QUICK), 0
    while not running.finished.all():
        result = play(running, steps=1)[0]
        assert result.evaluation.fresh.all()
        assert (running.population.measurements.contribution_age == 0).all()
        owning = running.population.table.owning
        assert (np.isfinite(result.evaluation.loss_contribution) == owning).all()
        seeds += int(owning.sum())
    assert seeds > 4


def test_a_newborn_is_probed_at_once_and_measured_in_its_turn() -> None:
    running = episodes(instances(1), 3)
    result = plant(running, 1)  # slot 1 is due at steps 2, 5, ...
    assert np.isnan(result.evaluation.loss_contribution[0, 1])
    assert running.population.measurements.probed[0].tolist() == [False, True, False]
    assert feature(running, "measured")[0, 1] == 0
    result = running.step(make_wait_actions(1))
    assert running.population.table.stage[0, 1] == Stage.BLENDING, "gate G1 does not wait for its turn"
    assert np.isnan(result.evaluation.loss_contribution[0, 1])
    assert ages(running)[0][1] == 0, "what is not known has no age"
    assert np.isfinite(running.step(make_wait_actions(1)).evaluation.loss_contribution[0, 1])
    assert feature(running, "measured")[0, 1] == 1


def test_a_new_seed_does_not_inherit_what_was_known_of_the_last_one() -> None:
    running = episodes(instances(1), 4)
    plant(running, 0)
    running.step(make_wait_actions(1))
    assert np.isfinite(running.engine.history.loss_contribution[0, 0])
    running.step(np.stack([make_action(Op.PRUNE, 0)]))
    assert np.isnan(running.engine.history.loss_contribution[0, 0])
    while running.population.table.stage[0, 0] != Stage.DORMANT:
        running.step(make_wait_actions(1))
    assert running.step_index[0] % 4 != 0, "the test means to germinate when slot 0 is not due"
    plant(running, 0, CONV)
    assert np.isnan(running.engine.history.loss_contribution[0, 0])
    assert feature(running, "contribution_velocity")[0, 0] == 0


@pytest.mark.parametrize(("oldest", "stale"), [(2, {3}), (1, {2, 3}), (3, set[int]())])
def test_gate_g5_refuses_what_is_older_than_the_rules_allow(oldest: int, stale: set[int]) -> None:
    rules = open_rules(cooldown=(1, 1, 1), measurement_max_age=oldest, harm_tolerance=1.0)
    running = episodes(instances(1), 4, rules)
    plant(running, 0)
    refused: set[int] = set()
    passed: set[int] = set()
    while not running.finished.all():
        age = ages(running)[0][0]
        holding = running.population.table.stage[0, 0] == Stage.HOLDING
        legal = bool(running.legal_actions().op[0, Op.FOSSILIZE])
        running.step(make_wait_actions(1))
        reason = running.engine.applied.gates[0, 0]
        if holding:
            assert legal == (reason == Reason.PASSED)
            (passed if legal else refused).add(age)
            assert reason == (Reason.STALE if age > oldest else Reason.PASSED)
    assert refused == stale
    assert passed == {0, 1, 2, 3} - stale


def test_turns_follow_from_a_networks_own_decisions() -> None:
    """Networks at different steps, and each of them alone."""
    first, other, later = instances(3)
    script = [
        make_action(Op.GERMINATE, 2, MLP),
        make_action(Op.GERMINATE, 0, CONV),
        *make_wait_actions(1),
        make_action(Op.GERMINATE, 1, MLP),
    ]
    script += [*make_wait_actions(5)]

    def alone(instance: Instance, steps: int) -> list[StepResult]:
        running = episodes([instance], 3)
        return [running.step(one[None]) for one in script[:steps]]

    together = episodes([first, other], 3)
    late = 2
    results: list[StepResult] = []
    for step, own in enumerate(script):
        if step == late:
            together.restart(np.array([1]), [later])
        neighbours = script[step - late if step >= late else step]
        results.append(together.step(np.stack([own, neighbours])))
    for row, reference, begun in ((0, alone(first, len(script)), 0), (1, alone(later, len(script) - late), late)):
        for joint, single in zip(results[begun:], reference, strict=True):
            np.testing.assert_array_equal(joint.evaluation.fresh[row], single.evaluation.fresh[0])
            np.testing.assert_allclose(
                joint.evaluation.loss_contribution[row], single.evaluation.loss_contribution[0], **TOLERANCE
            )
            np.testing.assert_allclose(joint.evaluation.loss[row], single.evaluation.loss[0], **TOLERANCE)
    assert (results[-1].evaluation.fresh[0] != results[-1].evaluation.fresh[1]).any()
    assert np.isfinite(results[-1].evaluation.loss_contribution).all()


def test_a_network_that_was_rolled_back_is_measured_whole() -> None:
    chosen = [one for one in instances(8) if one.drift_step is None][:3]
    growth = GrowthConfig(counterfactual_every=3)
    fossils = [(SeedKind(0, MLP), SeedKind(1, CONV))] * 3
    running = Episodes(SUITE, chosen, QUICK, growth, fossils=fossils)
    for _ in range(4):
        running.step(make_wait_actions(3))
    with torch.no_grad():
        running.population.host.values[1] = torch.nan
    found = running.step(make_wait_actions(3))
    assert found.intervention.rows.tolist() == [False, True, False]
    assert found.evaluation.fresh[1].all()
    assert found.evaluation.fresh[[0, 2]].tolist() == [due(4, 3)] * 2
    truth = evaluate(running.population, running.validation)
    np.testing.assert_allclose(found.evaluation.loss_contribution[1], truth.loss_contribution[1], **TOLERANCE)
    assert ages(running)[1] == [0, 0, 0]
    assert ages(running)[0] != [0, 0, 0]


@pytest.mark.parametrize("reward", ["shaped", "escrow"])
def test_rewards_are_paid_on_what_is_known(reward: str) -> None:
    """Between measurements nothing of it is paid, and what was paid adds up to what is known in the end."""
    running = episodes(instances(4), 3, reward=reward)
    name = "contribution" if reward == "escrow" else "attribution"
    results = [plant(running, 0)]
    while not running.finished.all():
        results.append(running.step(make_wait_actions(4)))
    for step, result in enumerate(results[:-1]):
        if step % 3:
            assert not result.terms[name].any()
    paid = np.sum([result.terms[name] for result in results], axis=0)
    np.testing.assert_allclose(paid, results[-1].reward_inputs.after.contribution["accuracy"].sum(axis=1), atol=1e-9)
    assert np.any([result.terms[name].any() for result in results])


# The governor leaves healthy networks alone, whatever a random controller does to them.


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("tokens", 128), ("digits", 128), ("mnist1d_conv", 24)])
def test_healthy_networks_are_not_rolled_back(name: str, count: int, count_figure: Callable[[str, int], None]) -> None:
    suite = get_suite(name)
    chosen = suite.sample(count, "train", np.random.default_rng(1))
    running, controller = Episodes(suite, chosen, Rules()), Uniform()
    state = controller.start([one.seed for one in chosen])
    while not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        assert not running.step(actions).intervention.rows.any()
    count_figure("checks of healthy networks without a false alarm", count * suite.steps)
