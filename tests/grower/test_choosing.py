"""Rules that go by a horizon judge every seed before it ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import esper
from esper.lifecycle.stages import Stage


@pytest.mark.parametrize("controller", ["heuristic", "periodic"])
@pytest.mark.parametrize("horizon", [3, 12, 14, 20, 40])
def test_no_seed_is_left_unfinished(controller: str, horizon: int):
    host = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model = esper.attach(host, ["0", "2"], torch.zeros(2, 4))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.0))
    measured = iter(range(10**6))
    # A loss that falls with every call: there is always something to gain, and every seed is worth its place.
    grower = esper.Grower(
        model, optimizer, controller, evaluate=lambda _: (1 / (1 + next(measured)), 0.5), horizon=horizon
    )
    decisions = [grower.step(train_loss=1.0) for _ in range(horizon)]
    germinated = sum(change.after is Stage.GERMINATED for one in decisions for change in one.changes)
    assert (germinated > 0) == (horizon >= 12)
    assert all(seed.fossilized for seed in model.seeds.values())
