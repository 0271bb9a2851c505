"""Counterfactuals in turns: when each slot is measured, what stands in between, and who sees how old it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from esper.control.observation import SLOT_FEATURES
from esper.lifecycle.actions import Op, action, wait
from esper.lifecycle.gates import Reason
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.rl.conduct import Conduct
from esper.rl.episodes import Episodes, StepResult
from esper.rl.rewards import RewardSettings
from esper.tasks.instance import Instance
from esper.training.evaluation import evaluate
from esper.training.roster import SeedKind
from open_rules import open_rules
from rl.short import QUICK, SUITE, instances, play

SLOTS = len(SUITE.sites)
MLP, CONV = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("token_conv")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def episodes(chosen: Sequence[Instance], every: int, rules: Rules = QUICK, reward: str = "outcome") -> Episodes:
    conduct = Conduct(governor=None, counterfactual_every=every)
    return Episodes(SUITE, chosen, rules, conduct, rewards=[RewardSettings(mode=reward)] * len(chosen))


def plant(running: Episodes, slot: int, blueprint: int = MLP) -> StepResult:
    """Germinate in one slot of every network."""
    return running.step(np.stack([action(Op.GERMINATE, slot, blueprint)] * running.size))


def ages(running: Episodes) -> list[list[int]]:
    return running.population.evidence.contribution_age.tolist()


def feature(running: Episodes, name: str) -> np.ndarray:
    return running.observe().slots[..., [one.name for one in SLOT_FEATURES].index(name)].numpy()


def due(step: int, every: int) -> list[bool]:
    return [(step + slot) % every == 0 for slot in range(SLOTS)]


def test_slots_take_turns_and_the_last_measurement_stands() -> None:
    every, running = 3, episodes(instances(2), 3)
    results = [plant(running, slot) for slot in range(SLOTS)] + [running.step(wait(2)) for _ in range(7)]
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
        found = running.step(wait(4)).evaluation
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
        assert (running.population.evidence.contribution_age == 0).all()
        owning = running.population.table.owning
        assert (np.isfinite(result.evaluation.loss_contribution) == owning).all()
        seeds += int(owning.sum())
    assert seeds > 4


def test_ages_grow_until_the_next_turn_and_controllers_see_them() -> None:
    running = episodes(instances(1), 3)
    plant(running, 0)  # at step 0, when slot 0 is due
    assert ages(running)[0][0] == 0
    seen: list[int] = []
    for _ in range(7):
        running.step(wait(1))
        seen.append(ages(running)[0][0])
        np.testing.assert_allclose(feature(running, "evidence_age")[0, 0], seen[-1] / SUITE.steps, rtol=1e-6)
    assert seen == [1, 2, 0, 1, 2, 0, 1]


def test_a_newborn_is_probed_at_once_and_measured_in_its_turn() -> None:
    running = episodes(instances(1), 3)
    result = plant(running, 1)  # slot 1 is due at steps 2, 5, ...
    assert np.isnan(result.evaluation.loss_contribution[0, 1])
    assert running.population.evidence.probed[0].tolist() == [False, True, False]
    assert feature(running, "measured")[0, 1] == 0
    result = running.step(wait(1))
    assert running.population.table.stage[0, 1] == Stage.BLENDING, "gate G1 does not wait for its turn"
    assert np.isnan(result.evaluation.loss_contribution[0, 1])
    assert ages(running)[0][1] == 0, "what is not known has no age"
    assert np.isfinite(running.step(wait(1)).evaluation.loss_contribution[0, 1])
    assert feature(running, "measured")[0, 1] == 1


def test_a_new_seed_does_not_inherit_what_was_known_of_the_last_one() -> None:
    running = episodes(instances(1), 4)
    plant(running, 0)
    running.step(wait(1))
    assert np.isfinite(running.history.loss_contribution[0, 0])
    running.step(np.stack([action(Op.PRUNE, 0)]))
    assert np.isnan(running.history.loss_contribution[0, 0])
    while running.population.table.stage[0, 0] != Stage.DORMANT:
        running.step(wait(1))
    assert running.step_index[0] % 4 != 0, "the test means to germinate when slot 0 is not due"
    plant(running, 0, CONV)
    assert np.isnan(running.history.loss_contribution[0, 0])
    assert feature(running, "contribution_velocity")[0, 0] == 0


@pytest.mark.parametrize(("oldest", "stale"), [(2, {3}), (1, {2, 3}), (3, set[int]())])
def test_gate_g5_refuses_what_is_older_than_the_rules_allow(oldest: int, stale: set[int]) -> None:
    rules = open_rules(cooldown=(1, 1, 1), evidence_max_age=oldest, harm_tolerance=1.0)
    running = episodes(instances(1), 4, rules)
    plant(running, 0)
    refused: set[int] = set()
    passed: set[int] = set()
    while not running.finished.all():
        age = ages(running)[0][0]
        holding = running.population.table.stage[0, 0] == Stage.HOLDING
        legal = bool(running.legal_actions().op[0, Op.FOSSILIZE])
        reason = running.step(wait(1)).verdicts.reason[0, 0]
        if holding:
            assert legal == (reason == Reason.PASSED)
            (passed if legal else refused).add(age)
            assert reason == (Reason.STALE if age > oldest else Reason.PASSED)
    assert refused == stale
    assert passed == {0, 1, 2, 3} - stale


def test_turns_follow_from_a_networks_own_decisions() -> None:
    """Networks at different steps, and each of them alone."""
    first, other, later = instances(3)
    script = [action(Op.GERMINATE, 2, MLP), action(Op.GERMINATE, 0, CONV), *wait(1), action(Op.GERMINATE, 1, MLP)]
    script += [*wait(5)]

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
    conduct = Conduct(counterfactual_every=3)
    fossils = [(SeedKind(0, MLP), SeedKind(1, CONV))] * 3
    running = Episodes(SUITE, chosen, QUICK, conduct, fossils=fossils)
    for _ in range(4):
        running.step(wait(3))
    with torch.no_grad():
        running.population.host.values[1] = torch.nan
    found = running.step(wait(3))
    assert {one.environment for one in found.incidents} == {1}
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
        results.append(running.step(wait(4)))
    for step, result in enumerate(results[:-1]):
        if step % 3:
            assert not result.terms[name].any()
    paid = np.sum([result.terms[name] for result in results], axis=0)
    np.testing.assert_allclose(paid, results[-1].facts.after.accuracy.contribution.sum(axis=1), atol=1e-9)
    assert np.any([result.terms[name].any() for result in results])
