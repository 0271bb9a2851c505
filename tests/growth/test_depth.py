"""Growing deeper tells configurations and caches, by the names that they have, of models of any kind."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growth.blueprints.registry import LayerCall
from esper.growth.depth import deepen, find_configuration
from esper.growth.model import GrowingModel
from esper.growth.outputs import find_outputs
from growth.hosts import TransformerBlock

WIDTH = 6


@dataclass
class Config:
    n_layer: int
    layer_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Frozen:
    num_layers: int


class Mixing(nn.Module):
    """Adds the mean of all that it has seen."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: dict[int, list[Tensor]] | None = None) -> Tensor:
        kept = [x] if cache is None else cache.setdefault(self.layer_idx, [])
        if cache is not None:
            kept.append(x)
        return x + self.linear(torch.stack(kept).mean(0))


class Stack(nn.Module):
    def __init__(self, config: Any, depth: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList([Mixing(config, number) for number in range(depth)])

    def forward(self, x: Tensor, cache: dict[int, list[Tensor]] | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, cache)
        return x


def inputs() -> Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0))


def grown(config: Any, *behind: int, depth: int = 3) -> GrowingModel:
    model = esper.attach(Stack(config, depth), {r"re:blocks\.\d+": ["block_copy"]}, inputs())
    for place in behind:
        model.slots[f"blocks.{place}"].germinate("block_copy", alpha=1.0)
        model.slots[f"blocks.{place}"].fossilize()
    return model


def numbers(model: nn.Module) -> list[int]:
    return [block.layer_idx for block in model.blocks]


@pytest.mark.parametrize("config", [Config(3), Frozen(3)])
def test_a_configuration_counts_what_grew(config: Any) -> None:
    before = replace(config)
    model = grown(config, 0, 2)
    plain = model.finalize()
    name = "n_layer" if isinstance(config, Config) else "num_layers"
    for one in (model, plain):
        assert getattr(one.config, name) == 5
    assert config == before
    assert all(block.config is plain.config for block in plain.blocks)
    model.release()
    assert model.host.config is config
    assert all(block.config is config for block in model.host.blocks)


@pytest.mark.parametrize("config", [None, {"n_layer": 3}, Config(7)])
def test_what_does_not_say_so_stays(config: Any) -> None:
    before = copy.deepcopy(config)
    plain = grown(config, 1).finalize()
    assert plain.config == before
    assert numbers(plain) == [0, 1, 2, 3]


def test_every_copy_has_a_layer_of_its_own_in_a_cache() -> None:
    model = grown(Config(3), 2, 0)
    cache: dict[int, list[Tensor]] = {}
    model(inputs(), cache)
    model(inputs(), cache)
    assert {layer: len(kept) for layer, kept in cache.items()} == dict.fromkeys(range(5), 2)
    assert numbers(model.host) == [0, 1, 2]
    plain = model.finalize()
    assert numbers(plain) == [0, 1, 2, 3, 4]
    assert torch.equal(plain(inputs()), model(inputs()))


def test_entries_for_each_block_follow_the_order_of_blocks() -> None:
    model = grown(Config(3, ("a", "b", "c")), 1, 0)
    assert model.config.layer_types == ("a", "b", "c", "b", "a")
    assert model.finalize().config.layer_types == ("a", "a", "b", "b", "c")


def test_the_nearest_configuration_that_counts_the_blocks_is_the_one() -> None:
    whole = nn.Sequential(Stack(Config(3), 3), Stack(Config(2), 2))
    whole.config = Config(2)  # type: ignore[assignment]
    assert find_configuration(whole, "0.blocks", 3).configuration is whole[0].config
    assert find_configuration(whole, "1.blocks", 2).configuration is whole[1].config
    assert find_configuration(whole, "0", 2).configuration is whole.config
    assert find_configuration(whole, "0.blocks", 4) is None
    whole[1].blocks.insert(1, Mixing(whole[1].config, 0))
    deepen(whole, {"1.blocks.0": "1.blocks.0"})
    assert [whole[0].config.n_layer, whole[1].config.n_layer, whole.config.n_layer] == [3, 3, 2]
    assert numbers(whole[1]) == [0, 1, 2]


class Gated(nn.Module):
    """A branch that ends in a product, and one whose last weights are not those of a module that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.zeros(WIDTH))
        self.up, self.gate = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), x, x)[0]
        return x + self.scale * self.down(self.up(x) * self.gate(x).sigmoid())


def test_the_ends_of_branches_are_found_even_where_they_are_zero() -> None:
    torch.manual_seed(0)
    block = Gated()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    found = find_outputs(block, LayerCall((inputs(),), {}))
    assert sorted(found) == ["attention.out_proj.bias", "attention.out_proj.weight", "scale"]
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    block = TransformerBlock(WIDTH, causal=False)
    torch.manual_seed(1)
    ends = find_outputs(block, LayerCall((inputs(),), {}))
    for name in ends:
        nn.init.zeros_(block.get_parameter(name))
    assert torch.equal(block(inputs()), inputs())
    loss = (block(inputs()) * inputs().flip(0)).sum()
    assert all(gradient.any() for gradient in torch.autograd.grad(loss, [block.get_parameter(name) for name in ends]))


def test_caches_are_left_out_when_ends_are_looked_for() -> None:
    cache: dict[int, list[Tensor]] = {0: [inputs() + 1]}
    found = find_outputs(Mixing(None, 0), LayerCall((inputs(), cache), {}))
    assert sorted(found) == ["linear.bias", "linear.weight"]
    assert len(cache[0]) == 1


@pytest.mark.parametrize("block", [nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 8)])
def test_what_cannot_be_the_identity_has_none(block: nn.Module) -> None:
    assert find_outputs(block, LayerCall((inputs(),), {})) == ()
