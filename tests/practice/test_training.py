"""What seeds cost a training."""

from __future__ import annotations

import torch

from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.practice.training import count_seed_flops
from esper.tasks.practice.hosts import MlpNet, build_host


def test_seeds_cost_what_their_blueprints_say_and_dormant_slots_nothing() -> None:
    host = build_host(lambda: MlpNet(12, 8, 5), torch.Generator().manual_seed(0))
    model = GrowingModel(host, ["layer1", "layer2"], torch.zeros(2, 12))
    assert count_seed_flops(*model.slots.values()) == 0
    for name in ("layer1", "layer2"):
        model.slots[name].germinate("mlp", torch.Generator().manual_seed(0))
    assert count_seed_flops(*model.slots.values()) == 2 * get("mlp").flops_at(model.slots["layer1"].site) > 0
