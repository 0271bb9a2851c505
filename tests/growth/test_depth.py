"""Growing deeper updates configurations and caches, by their names, of models of any kind."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.errors import SlotError
from esper.growth.blueprints.blocks import find_branch_outputs
from esper.growth.blueprints.registry import LayerCall
from esper.growth.depth import deepen, find_configuration
from esper.growth.model import GrowingModel
from esper.growth.persist import replace_seeds
from factories import TransformerBlock

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


def germinated(model: GrowingModel) -> GrowingModel:
    model.slots["blocks.0"].germinate("block_copy", alpha=1.0)
    return model


def mirrored(model: GrowingModel) -> GrowingModel:
    average = copy.deepcopy(model)
    model.mirror(average)
    germinated(model)
    return average


@pytest.mark.parametrize("grow", [germinated, mirrored])
def test_a_block_has_the_configuration_of_its_host_whatever_way_it_came(
    grow: Callable[[GrowingModel], GrowingModel],
) -> None:
    model = esper.attach(Stack(Config(3), 3), {"blocks.0": ["block_copy"]}, inputs())
    model = grow(model)
    model.slots["blocks.0"].fossilize()
    for one in (model, model.finalize()):
        configurations = [part.config for part in one.modules() if "config" in vars(part)]
        assert len(configurations) == 5
        assert all(config is one.config for config in configurations)
        assert one.config.n_layer == 4


@dataclass(slots=True)
class Slotted:
    n_layer: int
    rate: float = 0.1
    nested: Any = None


class Stored:
    """Keeps its attributes elsewhere."""

    def __init__(self, **values: Any) -> None:
        vars(self)["values"] = values

    def __getattr__(self, name: str) -> Any:
        if name == "values" or name not in self.values:
            raise AttributeError(name)
        return self.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value


@pytest.mark.parametrize(
    "config",
    [Slotted(3, nested={}), SimpleNamespace(n_layer=3, rate=0.1, nested={})],
    ids=lambda one: type(one).__name__,
)
def test_what_is_set_on_a_configuration_while_something_grows_stays(config: Any) -> None:
    model = esper.attach(Stack(config, 3), {r"re:blocks\.\d+": ["block_copy"]}, inputs())
    model.slots["blocks.0"].germinate("block_copy", alpha=1.0)
    model.config.rate = 0.5
    model.config.nested["rate"] = 0.5
    model.slots["blocks.1"].germinate("block_copy", alpha=1.0)
    assert (model.config.n_layer, model.config.rate) == (5, 0.5)
    model.config.rate = 0.7
    model.slots["blocks.0"].prune()
    assert (model.config.n_layer, model.config.rate, model.config.nested["rate"]) == (4, 0.7, 0.5)
    model.config.rate = 0.9
    model.slots["blocks.1"].fossilize()
    plain = model.finalize()
    assert (plain.config.n_layer, plain.config.rate, plain.config.nested["rate"]) == (4, 0.9, 0.5)
    model.release()
    assert model.host.config is config
    assert (config.n_layer, config.rate, config.nested["rate"]) == (3, 0.9, 0.5)


def test_a_configuration_that_keeps_its_attributes_elsewhere_stays_as_it_is() -> None:
    config = Stored(n_layer=3)
    model = grown(config, 0)
    assert (model.config.n_layer, model.finalize().config.n_layer, config.n_layer) == (4, 4, 3)


def test_two_lists_of_blocks_of_one_configuration_give_it_back() -> None:
    host = nn.Sequential(Stack(None, 2), Stack(None, 3))
    host.config = original = Config(2)
    model = esper.attach(host, {r"re:\d\.blocks\.0": ["block_copy"]}, inputs())
    model.slots["0.blocks.0"].germinate("block_copy")
    model.slots["1.blocks.0"].germinate("block_copy")  # whose list now has the length in the configuration
    assert model.config.n_layer == 4
    model.release()
    assert host.config is original


class Counted(nn.Module):
    """Context its configuration when it is called."""

    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = Config(2)
        self.blocks = nn.ModuleList([block(number) for number in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.config.n_layer):
            if number < len(self.blocks):
                x = self.blocks[number](x) / math.sqrt(self.config.n_layer)
        return x


def test_a_host_without_a_cache_reads_how_many_blocks_it_has_itself() -> None:
    host = Counted(lambda _: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    expected = host(inputs())
    model = esper.attach(host, {"blocks.0": ["block_copy"]}, inputs())
    model.slots["blocks.0"].germinate("block_copy")
    assert model.config.n_layer == 2
    assert torch.equal(model(inputs()), expected)


def test_without_growth_a_host_reads_how_many_blocks_it_has_itself() -> None:
    host = Counted(lambda number: Mixing(None, number))
    original, expected = host.config, host(inputs())
    model = esper.attach(host, {"blocks.0": ["block_copy"]}, inputs())
    model.slots["blocks.0"].germinate("block_copy", alpha=1.0)
    assert not torch.equal(model(inputs()), expected)
    with model.without_growth():
        with model.without_growth():
            assert torch.equal(model(inputs()), expected)
        assert model.config is original
        original.layer_types = ("full", "sliding")
    assert (model.config.n_layer, original.n_layer) == (3, 2)
    assert model.config.layer_types == ("full", "sliding", "full")


class Tuple(NamedTuple):
    n_layer: int = 3


class ReadOnly:
    @property
    def n_layer(self) -> int:
        return 3


class Global:
    n_layer = 3


@pytest.mark.parametrize("config", [Tuple(), ReadOnly(), Global], ids=["tuple", "property", "class"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_configuration_that_cannot_be_set_is_refused_before_anything_is_planted(config: Any, cached: bool) -> None:
    host = nn.Sequential(Stack(Config(2), 2), Stack(config, 3))
    if not cached:
        for block in host[1].blocks:
            del block.layer_idx
            block.forward = lambda x, cache=None: x
    model = esper.attach(host, {r"re:\d\.blocks\.0": ["block_copy"]}, inputs())
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.01))
    model.link(optimizer)
    model.slots["0.blocks.0"].germinate("block_copy")
    with pytest.raises(SlotError, match=r"has 3 blocks by 'n_layer', which cannot be changed"):
        model.slots["1.blocks.0"].germinate("block_copy")
    assert list(model.seeds) == ["0.blocks.0"]
    assert [len(group["params"]) for group in optimizer.param_groups[1:]] == [2, 0]
    assert (host[0].config.n_layer, host[1].config, config.n_layer) == (3, config, 3)


def test_seeds_that_cannot_be_planted_leave_what_grew_and_its_moments() -> None:
    def attached(config: Any) -> esper.GrowingModel:
        host = nn.Sequential(Stack(Config(2), 2), Stack(config, 3))
        return esper.attach(host, {r"re:\d\.blocks\.0": ["block_copy"]}, inputs())

    other, model = attached(Config(3)), attached(Tuple())
    for name in other.slots:
        other.slots[name].germinate("block_copy", alpha=1.0)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    model.link(optimizer)
    seed = model.slots["0.blocks.0"].germinate("block_copy", alpha=1.0)
    model(inputs()).square().sum().backward()
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(SlotError, match="which cannot be changed"):
        replace_seeds(model, copy.deepcopy(other).seeds)
    assert model.seeds == {"0.blocks.0": seed}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert str(optimizer.state_dict()) == str(state)


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
    stacks = nn.Sequential(Stack(Config(3), 3), Stack(Config(2), 2))
    stacks.config = Config(2)
    assert find_configuration(stacks, "0.blocks", 3) is stacks[0].config
    assert find_configuration(stacks, "1.blocks", 2) is stacks[1].config
    assert find_configuration(stacks, "0", 2) is stacks.config
    assert find_configuration(stacks, "0.blocks", 4) is None
    stacks[1].blocks.insert(1, Mixing(stacks[1].config, 0))
    deepen(stacks, {"1.blocks.0": "1.blocks.0"})
    assert [stacks[0].config.n_layer, stacks[1].config.n_layer, stacks.config.n_layer] == [3, 3, 2]
    assert numbers(stacks[1]) == [0, 1, 2]


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
    names = find_branch_outputs(block, LayerCall((inputs(),), {}))
    assert sorted(names) == ["attention.out_proj.bias", "attention.out_proj.weight", "scale"]
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    block = TransformerBlock(WIDTH, causal=False)
    torch.manual_seed(1)
    ends = find_branch_outputs(block, LayerCall((inputs(),), {}))
    for name in ends:
        nn.init.zeros_(block.get_parameter(name))
    assert torch.equal(block(inputs()), inputs())
    loss = (block(inputs()) * inputs().flip(0)).sum()
    assert all(gradient.any() for gradient in torch.autograd.grad(loss, [block.get_parameter(name) for name in ends]))


def test_caches_are_left_out_when_ends_are_looked_for() -> None:
    cache: dict[int, list[Tensor]] = {0: [inputs() + 1]}
    names = find_branch_outputs(Mixing(None, 0), LayerCall((inputs(), cache), {}))
    assert sorted(names) == ["linear.bias", "linear.weight"]
    assert len(cache[0]) == 1


@pytest.mark.parametrize("block", [nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 8)])
def test_what_cannot_be_the_identity_has_none(block: nn.Module) -> None:
    assert find_branch_outputs(block, LayerCall((inputs(),), {})) == ()
