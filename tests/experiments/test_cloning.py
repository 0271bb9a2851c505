"""A policy that starts by imitating a baseline does what the baseline does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.checkpoints import Checkpoints
from esper.config import load_settings
from esper.control.learned import LearnedController
from esper.errors import ConfigError
from esper.experiments.collect import collect_expert_rollouts, new_policy
from esper.experiments.settings import TrainSettings
from esper.experiments.workers import LocalWorkers
from esper.lifecycle.actions import PerHead
from esper.rl.cloning import CloningSettings, clone
from esper.rl.episodes import Episodes
from esper.rl.rollout import Rollout
from experiments.runs import ignore, resumed, started, tiny
from experiments.short_suite import ShortSuite, short_suite

SHOWN = CloningSettings(controller="all_at_start", episodes=14, passes=60, minibatches=2, learning_rate=1e-2)


@pytest.fixture(autouse=True, scope="module")
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


@pytest.fixture(scope="module")
def settings() -> TrainSettings:
    return tiny().model_copy(update={"cloning": SHOWN, "iterations": 1})


@pytest.fixture(scope="module")
def shown(settings: TrainSettings) -> Rollout:
    with LocalWorkers(1) as workers:
        return collect_expert_rollouts(settings, SHOWN, workers)


def test_a_clone_decides_as_it_was_shown(settings: TrainSettings, shown: Rollout) -> None:
    policy = new_policy(settings)
    found = clone(policy, shown, SHOWN, 1.0, 0)
    assert found.loss_after < 0.2 < found.loss_before
    suite = ShortSuite()
    chosen = suite.sample(14, "heldout", np.random.default_rng(2))
    running, controller = Episodes(suite, chosen, settings.rules), LearnedController(policy, greedy=True)
    state, operations = controller.start([one.seed for one in chosen]), []
    while not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        running.step(actions)
        operations.append(actions[:, 0])
    # On networks it never saw: plant in each slot, one after the other, from the start.
    assert (np.stack(operations)[:3] == shown.actions[:3, :1, 0].numpy()).mean() > 0.9


def test_a_clone_keeps_the_floors_of_its_probabilities(settings: TrainSettings, shown: Rollout) -> None:
    floors = PerHead.every(0.0).model_copy(update={"op": 0.1, "slot": 0.05})
    policy = new_policy(replaced(settings, probability_floor=floors))
    clone(policy, shown, SHOWN, 1.0, 0)
    with torch.no_grad():
        now = policy.evaluate(shown.observations, shown.masks, shown.actions, shown.state)
    is_open = policy.open_heads(shown.masks, shown.actions) & shown.running.unsqueeze(-1)
    for head, floor in enumerate(floors.by_head):
        if is_open[..., head].any():
            likeliest = float(now.chosen_log_prob[..., head][is_open[..., head]].exp().amax())
            assert 1 - 2 * floor - 0.05 < likeliest <= 1 - floor + 1e-6


def replaced(settings: TrainSettings, **policy: object) -> TrainSettings:
    return settings.model_copy(update={"policy": settings.policy.model_copy(update=policy)})


def test_the_value_function_foresees_what_the_demonstrator_earned(settings: TrainSettings, shown: Rollout) -> None:
    policy = new_policy(settings)
    clone(policy, shown, SHOWN, 1.0, 0)
    with torch.no_grad():
        value = policy.evaluate(shown.observations, shown.masks, shown.actions, shown.state).value
    returns = shown.reward.flip(0).cumsum(0).flip(0)
    explained = 1 - (returns - value).var() / returns.var()
    assert explained > 0.5


def test_steps_behind_an_episodes_end_are_not_imitated(settings: TrainSettings, shown: Rollout) -> None:
    def cloned(actions: torch.Tensor) -> dict[str, torch.Tensor]:
        policy = new_policy(settings)
        running = torch.ones_like(shown.running)
        running[4:, ::2] = False
        clone(policy, shown._replace(actions=actions, running=running), SHOWN, 1.0, 0)
        return policy.state_dict()

    other = shown.actions.clone()
    other[4:, ::2] = 0
    one, two, fresh = cloned(shown.actions), cloned(other), new_policy(settings).state_dict()
    assert not torch.equal(other, shown.actions)
    assert any(not torch.equal(one[name], fresh[name]) for name in one)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_begins_with_the_clone_and_goes_on_exactly(tmp_path: Path, settings: TrainSettings) -> None:
    settings = settings.model_copy(update={"iterations": 2, "checkpoint_every": 1})
    with started(tmp_path / "whole", settings) as trainer:
        trainer.train(ignore)
        assert trainer.store.series("cloning/loss")[0][0] == 0
        assert dict(trainer.store.series("environment_steps"))[0] == SHOWN.episodes * ShortSuite.steps
    first = Checkpoints(tmp_path / "whole" / "checkpoints").load(0)
    plain = new_policy(settings).state_dict()
    assert any(not torch.equal(first.tensors[f"policy.{name}"], value) for name, value in plain.items())
    with started(tmp_path / "stopped", settings):
        pass
    with resumed(tmp_path / "stopped") as trainer:
        assert trainer.done == 0
        trainer.train(ignore)
    newest = [Checkpoints(tmp_path / name / "checkpoints").latest().tensors for name in ("whole", "stopped")]
    assert newest[0].keys() == newest[1].keys()
    assert all(torch.equal(newest[0][name], newest[1][name]) for name in newest[0])


def test_who_is_not_known_cannot_be_imitated() -> None:
    with pytest.raises(ConfigError, match="no baseline is called 'nobody'"):
        load_settings(TrainSettings, None, ["cloning.controller=nobody"])
