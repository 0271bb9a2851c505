"""A branch trains as the model would have, touches nothing of it, and its FLOPs are counted with the others."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import esper
from esper.control.rules import Planting, Schedule
from esper.errors import ConfigError, SlotError
from esper.grower.spending import Spending, branch, warmup_stable_decay
from factories import HELD, make_data, make_growing, validate


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    inputs, labels = make_data()
    losses: list[float] = []
    model.train()
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def grown() -> tuple[esper.GrowingModel, torch.optim.Optimizer]:
    model = make_growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    model.link(optimizer)
    model.slots["0"].germinate("mlp", alpha=1.0)
    learn(model, optimizer)
    return model, optimizer


def test_it_goes_on_as_the_model_would_and_leaves_it_as_it_is() -> None:
    model, optimizer = grown()
    before = copy.deepcopy(model.state_dict())
    rung = branch(model, optimizer)
    went = learn(rung.model, rung.optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert went == learn(model, optimizer), "moments included"


def test_both_grow_by_themselves_without_a_warning() -> None:
    model, optimizer = grown()
    rung = branch(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rung.model.slots["2"].germinate("mlp", alpha=1.0)
        model.slots["0"].remove()
        learn(rung.model, rung.optimizer)
        learn(model, optimizer)
    assert (set(rung.model.seeds), set(model.seeds)) == ({"0", "2"}, set())
    inputs, _ = make_data()
    plain = rung.model.eval().finalize()
    torch.testing.assert_close(plain(inputs), rung.model(inputs))


def test_it_is_trained_to_its_end_within_a_budget_that_the_growth_pays() -> None:
    model = make_growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    plan = Schedule([Planting(0, 0, 0)], horizon=10, keep_after=1000)
    grower = esper.Grower(model, optimizer, controller=plan, evaluate=validate, rules=HELD, classes=3, horizon=10)
    LambdaLR(optimizer, lambda _: 0.5)  # the schedule of the main line, here that it stands still
    for _ in range(2):
        (loss,) = learn(model, optimizer, 1)
        grower.step(train_loss=loss)
    before = grower.spending.flops
    rung = branch(model, optimizer, training_flops=1e6, counted_in=grower.spending)
    assert rung.optimizer.param_groups[0]["lr"] == 0.005
    decay = LambdaLR(rung.optimizer, lambda _: 0.5 * warmup_stable_decay(rung.spending.share, warmup=0, decay=1))
    while rung.spending.share < 1:
        learn(rung.model, rung.optimizer, 1)
        decay.step()
    assert rung.spending.flops >= 1e6
    assert grower.spending.flops == pytest.approx(before + rung.spending.flops)
    assert rung.optimizer.param_groups[0]["lr"] == 0
    assert optimizer.param_groups[0]["lr"] == 0.005
    (loss,) = learn(model, optimizer, 1)
    grower.step(train_loss=loss)


def test_it_may_be_finished_by_a_grower_of_its_own() -> None:
    model, optimizer = grown()
    model.slots["0"].fossilize()
    rung = branch(model, optimizer)
    grower = esper.Grower(rung.model, rung.optimizer, controller="none", evaluate=validate, classes=3)
    (loss,) = learn(rung.model, rung.optimizer, 1)
    grower.step(train_loss=loss)
    assert rung.model.slots["0"].seed is not None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": nn.Linear(2, 2)}, ConfigError, "give the model that esper.attach returned"),
        ({"training_flops": 0}, ConfigError, "give a number of FLOPs above 0"),
        ({"counted_in": 3.0}, ConfigError, "give an esper.grower.spending.Spending"),
        ({"optimizer": torch.optim.SGD(nn.Linear(4, 8).parameters())}, SlotError, "no parameter group for slot"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model, optimizer = grown()
    with pytest.raises(error, match=words):
        branch(**{"model": model, "optimizer": optimizer, **options})


def test_that_of_a_compiled_model_is_counted() -> None:
    model, optimizer = grown()
    model.compile(backend="eager")
    learn(model, optimizer, 1)
    rung = branch(model, optimizer, training_flops=1e6)
    learn(rung.model, rung.optimizer, 1)
    assert rung.spending.share > 0


def test_spending_is_handed_on() -> None:
    model = make_growing()
    whole, part = Spending(make_growing()), Spending(model)
    counted = Spending(model, counted_in=whole)
    counted.add(5.0)
    assert (whole.flops, counted.flops, part.flops) == (5.0, 5.0, 0.0)
