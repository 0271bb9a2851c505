"""Learning rates by the share of a budget: their shape, and that they reach what grows."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import esper
from esper.control.rules import Planting, Schedule
from esper.errors import ConfigError
from esper.ladders.plan import warmup_stable_decay
from factories import HELD, make_data, make_growing, validate


@pytest.mark.parametrize(
    ("share", "factor"),
    [(0, 0), (0.05, 0.5), (0.1, 1), (0.5, 1), (0.6, 1), (0.7, 0.5), (0.84, 1 - math.sqrt(0.6)), (1, 0), (1.5, 0)],
)
def test_it_rises_stays_and_falls(share: float, factor: float) -> None:
    assert warmup_stable_decay(share, warmup=0.1, decay=0.4) == pytest.approx(factor)


def test_phases_may_be_missing_and_by_default_a_fiftieth_rises_and_a_fifth_falls_to_nothing() -> None:
    assert [warmup_stable_decay(share, warmup=0, decay=0) for share in (0, 1)] == [1, 1]
    assert warmup_stable_decay(1.0, warmup=1, decay=0) == 1
    factors = [warmup_stable_decay(share) for share in (0.01, 0.02, 0.8, 0.85, 1.0)]
    assert factors == pytest.approx([0.5, 1, 1, 0.5, 0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": 0.6, "decay": 0.6}, "add up to more than 1"),
        ({"decay": 1.1}, "add up to more than 1"),
        ({"warmup": -0.1}, "warmup is -0.1: give a number of at least 0"),
        ({"share": math.nan}, "share is nan: give a number"),
        ({"share": "0.5"}, "share is .*: give a number"),
        ({"share": None}, "share is None: give a number"),
    ],
)
def test_what_is_no_share_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        warmup_stable_decay(**{"share": 0.5, **options})


def test_there_is_no_share_without_a_budget() -> None:
    model = make_growing()
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1))
    grower = esper.Grower(model, optimizer, controller="none", evaluate=validate, classes=3)
    with pytest.raises(ConfigError, match="give training_flops or seconds"):
        LambdaLR(optimizer, lambda _: warmup_stable_decay(grower.spending.share))


def test_what_grows_follows_it_at_a_rate_of_its_own_and_controllers_see_it() -> None:
    model, (inputs, labels) = make_growing(), make_data()
    host, *slots = model.parameter_groups(lr=0.1)
    optimizer = torch.optim.SGD([host, *({**group, "lr": 0.02} for group in slots)])
    plan = Schedule([Planting(0, 0, 0)], horizon=40, keep_after=1000)
    grower = esper.Grower(
        model, optimizer, controller=plan, evaluate=validate, rules=HELD, classes=3, training_flops=3e6, horizon=40
    )
    scheduler = LambdaLR(optimizer, lambda _: warmup_stable_decay(grower.spending.share, decay=0.5))
    seen: list[float] = []
    while not grower.finished:
        model.train()
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        share = grower.spending.share
        factor = warmup_stable_decay(share, decay=0.5)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, *[0.02 * factor] * 2])
        seen.append(float(grower.network.specs.learning_rates[0]))
        assert seen[-1] == pytest.approx(0.1 * factor)
        grower.step(train_loss=loss)
    assert model.seeds
    assert min(seen) < 0.05 < max(seen)
