"""A grower on every kind of network, under hand-written, random and learned control."""

import copy

import numpy as np
import pytest
import torch

from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.policy import Policy, PolicySettings
from esper.engine.observation import list_features
from esper.grower import Decision, Grower
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Op
from factories import CLASSES, RESNET, Host, every_host, loss, score

DECISIONS = 10


def controller(name: str) -> str | Controller:
    if name != "policy":
        return name
    policy = Policy(
        list_features(False).spec, PolicySettings(advice=None, hidden=8, width=8), torch.Generator().manual_seed(0)
    )
    return LearnedController(policy, greedy=False)


class Training:
    """A network in a loop, with a grower."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.model = host.attached()
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=3e-3))
        self.grower = Grower(
            self.model,
            self.optimizer,
            controller=controller(name),
            evaluate=self.evaluate,
            classes=CLASSES,
            horizon=20,
            seed=3,
        )

    def evaluate(self, model: GrowingModel) -> tuple[float, float]:
        return score(model, self.host.arguments())

    def step(self) -> Decision:
        self.optimizer.zero_grad()
        found = loss(self.model, self.host.arguments())
        found.backward()
        self.optimizer.step()
        return self.grower.step(train_loss=found)


@every_host
@pytest.mark.parametrize("name", ["heuristic", "random", "policy"])
@pytest.mark.few(4)
def test_it_grows_and_keeps_its_books(host: Host, name: str) -> None:
    training = Training(host, name)
    model, optimizer, germinations = training.model, training.optimizer, 0
    for _ in range(DECISIONS):
        decision = training.step()
        germinations += decision.op is Op.GERMINATE
        present = set(model.parameters())
        assert {parameter for group in optimizer.param_groups for parameter in group["params"]} == present
        assert set(optimizer.state) <= present
        live = training.grower.network.table.owning[0].tolist()
        assert live == [slot.seed is not None for slot in model.slots.values()]
        assert all(torch.isfinite(parameter).all() for parameter in present)
    assert germinations


@pytest.mark.landing
@every_host
def test_counterfactuals_are_what_taking_the_seed_out_by_hand_shows(host: Host) -> None:
    training = Training(host, "heuristic")
    counted = 0
    for _ in range(DECISIONS):
        training.step()
        table = training.grower.network.table
        due = np.ones(table.stage.shape, np.bool_)
        found = training.grower.backend.measure_dependence(due)
        usual = training.evaluate(training.model)
        for place, name in enumerate(training.model.slots):
            if training.model.slots[name].seed is None or not table.blended[0, place]:
                continue
            without = copy.deepcopy(training.model)
            without.slots[name].remove()
            loss_without, accuracy_without = training.evaluate(without)
            assert found.loss_contribution[0, place] == pytest.approx(loss_without - usual[0], abs=1e-6)
            assert found.accuracy_contribution[0, place] == pytest.approx(usual[1] - accuracy_without, abs=1e-6)
            counted += abs(loss_without - usual[0]) > 1e-6
    assert counted


def test_the_summary_tells_what_the_grower_measured() -> None:
    training = Training(RESNET, "heuristic")
    assert all(slot.contribution is None for slot in training.model.summary().slots)
    contributions: dict[str, float] = {}
    for _ in range(DECISIONS):
        contributions = training.step().contributions
    shown = {one.slot: one.contribution for one in training.model.summary().slots if one.contribution is not None}
    assert shown
    assert shown == {name: contributions[name] for name in shown}
