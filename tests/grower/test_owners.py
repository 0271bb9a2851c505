"""A grower notices when the model is trained or changed behind its back; averages go through all that it does."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper import Grower
from esper.errors import ConfigError, SlotError
from esper.growth.attach import attach
from factories import Loop, validate


def replaced(loop: Loop) -> None:
    """Another optimizer of the same model, as a loop makes one to begin a new phase."""
    loop.optimizer = torch.optim.AdamW(loop.model.parameter_groups(lr=1e-2))
    loop.scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer)


@pytest.mark.parametrize("when", [0, 3])
def test_a_replaced_optimizer_is_refused_and_a_grower_with_the_new_one_goes_on(when: int) -> None:
    loop = Loop("all_at_start")
    for _ in range(when):
        loop.epoch()
    replaced(loop)
    with pytest.raises(ConfigError, match="the grower's optimizer made no step, so another optimizer trains it"):
        loop.epoch()
    state = loop.grower.state_dict()
    loop.grower = Grower(loop.model, loop.optimizer, controller="all_at_start", evaluate=validate, horizon=20)
    loop.grower.load_state_dict(state)
    for _ in range(6):
        loop.epoch()
    owned = {parameter for group in loop.optimizer.param_groups for parameter in group["params"]}
    assert owned == set(loop.model.parameters())


IDLE: dict[str, Callable[[Loop], Any]] = {
    "nothing learned": lambda loop: None,
    "frozen": lambda loop: loop.model.requires_grad_(False),
    "loaded": lambda loop: loop.model.load_state_dict({k: v + 1 for k, v in loop.model.state_dict().items()}),
}


@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
def test_without_training_nothing_is_wrong(idle: Callable[[Loop], Any]) -> None:
    loop = Loop("none")
    idle(loop)
    loop.grower.step(train_loss=1.0)
    loop.grower.step(train_loss=1.0)


def test_a_decision_without_training_is_warned_of_once() -> None:
    loop = Loop("none")
    loop.epoch()
    with pytest.warns(UserWarning, match="the optimizer made no step since the last decision") as caught:
        loop.grower.step(train_loss=1.0)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        loop.grower.step(train_loss=1.0)


def test_decisions_beyond_the_horizon_are_warned_of_once() -> None:
    loop = Loop("none", horizon=3)
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            loop.epoch()
    with pytest.warns(UserWarning, match="this decision is beyond the horizon of 3"):
        loop.epoch()
    with warnings.catch_warnings(action="error"):
        loop.epoch()


def exchanged(loop: Loop) -> None:
    layers = loop.model.host
    assert isinstance(layers, nn.Sequential)
    layers[2] = nn.Linear(8, 8)


LOST: dict[str, Callable[[Loop], None]] = {"replaced": exchanged, "released": lambda loop: loop.model.release()}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_slots_that_are_called_no_more_are_refused(lose: Callable[[Loop], None]) -> None:
    loop = Loop("all_at_start")
    loop.epoch()
    lose(loop)
    with pytest.raises(SlotError, match=r"slot '\d' is no longer called: the model was released, or its submodule"):
        loop.epoch()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_goes_through_all_that_a_grower_does(use_buffers: bool) -> None:
    """Rollbacks included: it begins anew with what was restored, and with no seed that was pruned."""
    loop = Loop("periodic")
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    loop.model.mirror(average)
    grown: set[int] = set()
    for number in range(14):
        if number == 9:
            with torch.no_grad():
                loop.model.host.get_parameter("0.weight").fill_(math.nan)
            average.update_parameters(loop.model)
        loop.epoch()
        for (name, mine), (other, theirs) in zip(
            loop.model.state_dict().items(), average.module.state_dict().items(), strict=True
        ):
            assert name == other
            assert mine.shape == theirs.shape
            assert theirs.isfinite().all()
            assert not name.endswith("alpha") or torch.equal(mine, theirs)
        grown.add(len(loop.model.seeds))
        average.update_parameters(loop.model)
    assert len(grown) > 1
    assert loop.grower.governor.rollbacks.tolist() == [1]


def test_one_class_is_refused_with_what_to_say_instead() -> None:
    model = attach(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), ["0"], torch.zeros(2, 4))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=1e-2))
    with pytest.raises(ConfigError, match=r"^classes is 1: .*\(classes=2 for one yes/no output\)"):
        Grower(model, optimizer, evaluate=validate, classes=1)
    Grower(model, optimizer, evaluate=validate, classes=2)
