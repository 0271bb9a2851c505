"""What growth costs, and in which currency: a seed may be dear in parameters and cheap in FLOPs."""

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import esper
from esper.errors import ConfigError
from esper.grower import Grower
from esper.growth.model import GrowingModel
from esper.lifecycle.table import Stage
from esper.runs.events import StepTaken
from esper.runs.reader import RunReader

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
