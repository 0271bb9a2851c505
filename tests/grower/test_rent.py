"""What growth costs, and in which currency: a seed may be dear in parameters and cheap in FLOPs, whatever its blend."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.control.rules import Planting, Schedule
from esper.engine.budget import Budget
from esper.engine.engine import GrowthConfig
from esper.errors import ConfigError
from esper.grower import Grower
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import ALPHA_TARGETS, Blend, Op
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import Stage
from esper.runs.events import StepTaken
from esper.runs.reader import RunReader
from factories import Loop, make_growing

RENT, GAIN, WORTH = 0.5, 0.03, 0.2
Basis = Literal["parameters", "flops"]


def growing() -> GrowingModel:
    """Most FLOPs are before the pooling, where weights serve 40 positions, and the slot is behind it."""
    host = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 4))
    return esper.attach(host, {"3": ["lowrank"]}, torch.zeros(2, 4, 40))


def evaluate(model: GrowingModel) -> tuple[float, float]:
    return 1.0, WORTH + GAIN * any(float(seed.alpha) > 0 for seed in model.seeds.values())


def grown(decisions: int = 3, **options: Any) -> Grower:
    model = growing()
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.0))
    told: dict[str, Any] = {"classes": 2, "horizon": 20, "rent": RENT, **options}
    grower = Grower(model, optimizer, controller="all_at_start", evaluate=evaluate, **told)
    for _ in range(decisions):
        grower.step(train_loss=1.0)
    return grower


@pytest.mark.parametrize(("basis", "fate"), [("parameters", Stage.PRUNED), ("flops", Stage.FOSSILIZED)])
def test_what_is_worth_it_depends_on_what_rent_is_paid_on(basis: Basis, fate: Stage) -> None:
    (change,) = grown(rent_on=basis).finish().changes
    assert change.after is fate


@pytest.mark.parametrize("basis", ["parameters", "flops"])
def test_controllers_see_costs_in_that_currency(basis: Basis) -> None:
    grower = grown(rent_on=basis)
    seed, site = grower.model.seeds["3"], grower.model.slots["3"].site
    own, whole = (
        (sum(parameter.numel() for parameter in seed.parameters()), grower.model.host_parameters)
        if basis == "parameters"
        else (seed.flops_at(site), grower.model.host_flops)
    )
    assert whole
    charge, table = grower.network.charge, grower.network.table
    assert charge.of_slots(table)[0, 0] == pytest.approx(own / whole)
    assert charge.of_blueprints[0, 0, 0] == pytest.approx(own / whole)
    assert charge.added(table, table.blended)[0] == pytest.approx(own / whole)


@pytest.mark.parametrize("basis", ["parameters", "flops"])
def test_a_run_tells_what_was_paid(basis: Basis, tmp_path: Path) -> None:
    grower = grown(rent_on=basis, run=tmp_path / "run")
    with RunReader.open(tmp_path / "run" / "run.db") as reader:
        last = list(reader.events(StepTaken))[-1]
    own = grower.network.charge.of_slots(grower.network.table)[0, 0]
    assert own > 0
    assert last.objective == pytest.approx(WORTH + GAIN - RENT * math.log1p(own))


def test_what_cannot_be_charged_is_refused() -> None:
    with pytest.raises(ConfigError, match="rent_on is 'seconds': give 'parameters' or 'flops'"):
        grown(rent_on="seconds")
    model = growing()
    model.host_flops, model.uncounted_flops = None, "aten::_linalg_svd in '0'"
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.0))
    with pytest.raises(ConfigError, match="torch cannot count aten::_linalg_svd in '0': say 'parameters'"):
        Grower(model, optimizer, controller="none", evaluate=evaluate, classes=2, rent_on="flops")


every_blend = pytest.mark.parametrize("blend", Blend)
CAP = 1000
CAPPED = GrowthConfig(budget=Budget(parameters=CAP))


def rules(blend: Blend) -> Rules:
    return Rules(operations=tuple(Op), blends=(blend,), alpha_targets=ALPHA_TARGETS)


def parameters_of(model: GrowingModel) -> int:
    return sum(parameter.numel() for seed in model.seeds.values() for parameter in seed.parameters())


def assert_counted(loop: Loop) -> None:
    """Budget, rent and FLOPs are those of the modules that are there."""
    subject, everything = loop.grower.network, np.ones((1, 2), np.bool_)
    real, summary = parameters_of(loop.model), loop.model.summary()
    assert (subject.charge.added(subject.table, everything) * subject.host_parameters).tolist() == pytest.approx([real])
    assert subject.budget_left.tolist() == [1 - real / CAP]
    assert subject.specs.costs.flops.resident(subject.table).sum() == summary.flops
    assert summary.parameters == real


@every_blend
def test_budget_and_rent_count_what_the_model_really_has(blend: Blend) -> None:
    planting = Schedule([Planting(0, 0, 0), Planting(1, 1, 2)], 20)
    loop = Loop(planting, rules=rules(blend), growth=CAPPED)
    for _ in range(4):
        loop.epoch()
        assert_counted(loop)
    assert {seed.blend for seed in loop.model.seeds.values()} == {blend}
    assert len(loop.model.seeds) == 2


@every_blend
def test_fossils_from_before_are_counted_with_their_blend(blend: Blend) -> None:
    model = make_growing()
    model.slots["0"].germinate("mlp", blend=blend, alpha=1.0)
    model.slots["0"].fossilize()
    loop = Loop("none", model, growth=CAPPED)
    assert_counted(loop)
    loop.epoch()
    assert_counted(loop)
