"""FLOPs against counts by hand."""

from __future__ import annotations

import pytest
import torch

from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.practice.training import count_flops, count_seed_flops
from esper.tasks.practice.hosts import Gpt, MlpNet, build_host

LENGTH, WIDTH, CLASSES = 6, 8, 5


def mlp() -> MlpNet:
    return build_host(lambda: MlpNet(12, WIDTH, CLASSES), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("examples", [2, 5])
def test_a_multilayer_perceptron(examples: int) -> None:
    by_hand = 2 * (12 * WIDTH + WIDTH * WIDTH + WIDTH * CLASSES)
    assert count_flops(mlp(), torch.zeros(examples, 12)) == by_hand


def test_attention_is_counted_like_any_product() -> None:
    gpt = build_host(lambda: Gpt(LENGTH, WIDTH, 2, CLASSES), torch.Generator().manual_seed(0))
    projections = LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * 2 * WIDTH)
    mixing = 2 * LENGTH * LENGTH * WIDTH
    by_hand = 2 * (2 * (projections + mixing) + LENGTH * WIDTH * CLASSES)
    assert count_flops(gpt, torch.zeros(3, LENGTH, dtype=torch.int64)) == by_hand


def test_seeds_cost_what_their_blueprints_say_and_dormant_slots_nothing() -> None:
    model = GrowingModel(mlp(), ["layer1", "layer2"], torch.zeros(2, 12))
    assert count_seed_flops(*model.slots.values()) == 0
    for name in ("layer1", "layer2"):
        model.slots[name].germinate("mlp", torch.Generator().manual_seed(0))
    assert count_seed_flops(*model.slots.values()) == 2 * get("mlp").flops_at(model.slots["layer1"].site) > 0


def test_counting_leaves_the_mode_as_it_was() -> None:
    host = mlp()
    count_flops(host, torch.zeros(2, 12))
    assert host.training
    host.eval()
    count_flops(host, torch.zeros(2, 12))
    assert not host.training
