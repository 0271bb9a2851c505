"""FLOPs against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo.hosts import Gpt, MlpNet, build_host

from esper.growth.model import GrowingModel
from esper.numerics.flops import count_flops

LENGTH, WIDTH, CLASSES = 6, 8, 5


def mlp() -> MlpNet:
    return build_host(lambda: MlpNet(12, WIDTH, CLASSES), torch.Generator().manual_seed(0))


def counted(network: nn.Module, inputs: Tensor) -> int:
    found = count_flops(lambda: network(inputs))
    assert found is not None
    return found.total


@pytest.mark.parametrize("examples", [2, 5])
def test_a_multilayer_perceptron(examples: int) -> None:
    by_hand = 2 * (12 * WIDTH + WIDTH * WIDTH + WIDTH * CLASSES)
    assert counted(mlp(), torch.zeros(examples, 12)) == examples * by_hand


def test_attention_is_counted_like_any_product() -> None:
    gpt = build_host(lambda: Gpt(LENGTH, WIDTH, 2, CLASSES), torch.Generator().manual_seed(0))
    projections = LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * 2 * WIDTH)
    mixing = 2 * LENGTH * LENGTH * WIDTH
    by_hand = 2 * (2 * (projections + mixing) + LENGTH * WIDTH * CLASSES)
    assert counted(gpt, torch.zeros(3, LENGTH, dtype=torch.int64)) == 3 * by_hand


def test_a_growing_model_knows_what_its_host_takes_for_one_example() -> None:
    host = mlp()
    assert GrowingModel(host, ["layer1"], torch.zeros(3, 12)).host_flops == counted(host, torch.zeros(1, 12))


def test_parts_are_counted_over_all_their_calls() -> None:
    host, inputs = mlp(), torch.zeros(2, 12)
    found = count_flops(lambda: (host(inputs), host(inputs)), {"first": host.layer1, "all": host})
    assert found is not None
    assert found.parts == {"first": 2 * 2 * 2 * 12 * WIDTH, "all": found.total}


def test_counting_leaves_no_hooks_and_the_mode_as_it_was() -> None:
    host = mlp()
    count_flops(lambda: host(torch.zeros(2, 12)), {"first": host.layer1})
    assert host.training
    assert count_flops(lambda: None, {"first": host.layer1}) == (0, {"first": 0})


def test_what_torch_cannot_count_is_not_counted() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.ones(3, WIDTH)])
    assert count_flops(lambda: nn.Linear(WIDTH, WIDTH)(ragged)) is None
