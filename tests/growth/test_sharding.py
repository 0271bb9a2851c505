"""What grows on a host that two processes share by FSDP2 learns as in one process, and comes back in one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import esper
from esper.errors import SlotError
from esper.growth.blueprints.registry import for_site
from esper.growth.site import Layout, Site

RANKS, WIDTH, POSITIONS, CLASSES = 2, 8, 6, 3
PAIR = ("blocks.1.wide", "blocks.1.narrow")
GROWN = {"blocks.0": "block_copy", "blocks.1": "mlp", "head": "lora_4", "blocks.1.narrow": "units_4"}
SITE = Site(Layout.TOKENS, WIDTH, (POSITIONS,), (POSITIONS, WIDTH))
OFFERED = [*(kind.name for kind in for_site(SITE)), "block_copy", "block_zero"]


class Block(nn.Module):
    """Residual, with a buffer, and weights of which no two processes have the same number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.7), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.scale.to(features.dtype) * self.narrow(F.gelu(self.wide(self.norm(features))))


class Net(nn.Module):
    """Tokens ``[B, T, WIDTH]`` to logits ``[B, CLASSES]``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, POSITIONS, WIDTH, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


def attached() -> esper.GrowingModel:
    torch.manual_seed(0)
    slots = {"blocks.0": OFFERED, "blocks.1": OFFERED, "head": ["lora_4"], PAIR: ["units_4"]}
    return esper.attach(Net(), slots, data()[0][:2])


def share(model: esper.GrowingModel, size: int = RANKS) -> None:
    mesh = init_device_mesh("cpu", (size,))
    model.shard_growth(mesh=mesh)
    for block in model.host.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model.host, mesh=mesh)


def make_optimizer(model: esper.GrowingModel) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.02))
    model.link(optimizer)
    return optimizer


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, steps: int = 2) -> None:
    inputs, labels = data()
    model.train()
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def plant(model: esper.GrowingModel, slot: str, blueprint: str) -> None:
    model.slots[slot].germinate(blueprint, torch.Generator().manual_seed(3), alpha=0.5)


def live(model: esper.GrowingModel, part: slice, slot: str, blueprint: str) -> esper.GrowingModel:
    """A life of a seed, with all that happens to it by hand."""
    optimizer = make_optimizer(model)
    learn(model, optimizer, part)
    plant(model, slot, blueprint)
    learn(model, optimizer, part)
    with torch.no_grad():
        model.eval()(data()[0])  # which must not leave gathered parameters behind
    model.slots[slot].remove()
    assert not any(group["params"] for group in optimizer.param_groups[1:])
    plant(model, slot, blueprint)
    plant(model, "blocks.1", "mlp")
    learn(model, optimizer, part)
    model.slots[slot].set_alpha(1.0)
    model.slots[slot].fossilize()
    learn(model, optimizer, part)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    values: dict[str, Any] = dict(model.named_parameters())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for name, value in values.items()
    }


LIVES = [*(("blocks.0", blueprint) for blueprint in OFFERED), ("head", "lora_4"), ("blocks.1.narrow", "units_4")]


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    half = slice(rank * 4, rank * 4 + 4)
    for slot, blueprint in LIVES:
        model = attached()
        share(model)
        gathered = whole(live(model, half, slot, blueprint))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        torch.save(gathered, f"{folder}/{blueprint}-{rank}.pt")
    model = attached()
    share(model)
    optimizer = make_optimizer(model)
    for slot, blueprint in GROWN.items():
        model.slots[slot].germinate(blueprint, torch.Generator().manual_seed(3), alpha=1.0)
    learn(model, optimizer, half)
    states = get_state_dict(model, optimizer)
    checkpoint.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=f"{folder}/checkpoint")
    learn(model, optimizer, half)
    torch.save(whole(model), f"{folder}/later-{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.start_processes(_work, (str(folder),), RANKS, start_method="spawn")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "blueprint"), LIVES)
def test_it_learns_as_in_one_process(left: Path, slot: str, blueprint: str) -> None:
    expected = whole(live(attached(), slice(None), slot, blueprint))
    for rank in range(RANKS):
        torch.testing.assert_close(torch.load(left / f"{blueprint}-{rank}.pt"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_two_goes_on_in_one_and_becomes_plain(left: Path) -> None:
    model = attached()
    for slot, blueprint in GROWN.items():
        model.slots[slot].germinate(blueprint, torch.Generator().manual_seed(9), alpha=0.1)
    optimizer = make_optimizer(model)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=left / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    learn(model, optimizer, slice(None))
    torch.testing.assert_close(whole(model), torch.load(left / "later-0.pt"), rtol=1e-4, atol=1e-5)
    for slot in GROWN:
        model.slots[slot].fossilize()
    plain = model.eval().finalize()
    assert isinstance(plain, Net)
    assert len(plain.blocks) == 3
    assert plain.blocks[2].wide.out_features == plain.blocks[2].narrow.in_features == 9
    torch.testing.assert_close(plain(data()[0]), model(data()[0]))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """One process, which has all shards."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


WHOLE = {
    "finalize": lambda model, _: model.finalize(),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "branch": esper.branch,
    "save": lambda model, _: esper.save(model, "model.pt"),
    "mirror": lambda model, _: model.mirror(nn.Linear(1, 1)),
    "look": lambda model, _: model.look(lambda model, batch: model(batch).mean(1), [data()[0]]),
    "shard_growth again": lambda model, _: model.shard_growth(),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", WHOLE)
def test_what_needs_whole_parameters_is_refused(what: str) -> None:
    model = attached()
    share(model, 1)
    with pytest.raises(SlotError, match="is a DTensor.*this takes whole parameters|already called"):
        WHOLE[what](model, make_optimizer(model))


@pytest.mark.usefixtures("alone")
def test_seeds_are_not_whole_where_the_host_is_shared() -> None:
    model = attached()
    fully_shard(model.host, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(SlotError, match="is a DTensor"):
        plant(model, "blocks.0", "mlp")
    assert not model.seeds


@pytest.mark.usefixtures("alone")
def test_values_of_seeds_are_alike_in_all_processes() -> None:
    model = attached()
    share(model, 1)
    with pytest.raises(SlotError, match="give a generator"):
        model.slots["blocks.0"].germinate("mlp")


@pytest.mark.usefixtures("alone")
def test_options_are_those_of_fully_shard() -> None:
    model = attached()
    for name in ("mash", "reshard_after_forward", "module"):
        with pytest.raises(SlotError, match=f"shard_growth takes no '{name}': give options of fully_shard, of mesh"):
            model.shard_growth(**{name: 3})
    with pytest.raises(SlotError, match="mesh is an int, 3: give what init_device_mesh returns"):
        model.shard_growth(mesh=3)
    assert not model.sharded
    model.shard_growth()
    with pytest.raises(SlotError, match="already called"):
        model.shard_growth()


def test_there_must_be_processes() -> None:
    with pytest.raises(SlotError, match="call torch.distributed.init_process_group first"):
        attached().shard_growth()


@pytest.mark.usefixtures("alone")
def test_what_knows_whole_parameters_comes_later() -> None:
    model = attached()
    make_optimizer(model)
    with pytest.raises(SlotError, match="shard first, then make the optimizer"):
        model.shard_growth()
    averaged = attached()
    average = copy.deepcopy(averaged)
    averaged.mirror(average)
    with pytest.raises(SlotError, match="a copy of this model grows with it"):
        averaged.shard_growth()
    late = attached()
    optimizer = torch.optim.AdamW(late.parameter_groups(lr=0.02))
    share(late, 1)
    with pytest.raises(SlotError, match="or before sharding"):
        late.link(optimizer)


@pytest.mark.usefixtures("alone")
def test_a_host_that_stays_whole_is_told() -> None:
    model = attached()
    plant(model, "blocks.1", "mlp")
    model.shard_growth()
    with pytest.raises(SlotError, match="but the host is whole"):
        plant(model, "blocks.0", "mlp")
    for what in (copy.deepcopy, esper.GrowingModel.finalize, lambda model: esper.save(model, "model.pt")):
        with pytest.raises(SlotError, match="is a DTensor"):
            what(model)


@pytest.mark.usefixtures("alone")
def test_a_copy_is_of_what_the_block_is_by_now() -> None:
    """Values, buffers that changed or came, and weights that are one."""
    torch.manual_seed(0)
    net = Net()
    net.blocks[0].tied = nn.Linear(WIDTH, 5)
    net.blocks[0].tied.weight = net.blocks[0].wide.weight
    model = esper.attach(net, {"blocks.0": ["block_copy"]}, data()[0][:2])
    share(model, 1)
    net.blocks[0].scale = torch.full((2,), 0.3)
    net.blocks[0].register_buffer("later", torch.ones(3))
    plant(model, "blocks.0", "block_copy")
    block = model.seeds["blocks.0"].blueprint.find_block()
    assert block is not None
    assert block.get_parameter("tied.weight") is block.get_parameter("wide.weight")
    for name in ("scale", "later"):
        assert torch.equal(block.get_buffer(name), net.blocks[0].get_buffer(name))
        assert block.get_buffer(name) is not net.blocks[0].get_buffer(name)
    torch.testing.assert_close(whole(block), whole(net.blocks[0]))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("blueprint", ["block_copy", "mlp"])
def test_a_policy_of_mixed_precision_goes_for_seeds_too(blueprint: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = attached()
    model.shard_growth(mp_policy=policy)
    for block in model.host.get_submodule("blocks").children():
        fully_shard(block, mp_policy=policy)
    fully_shard(model.host, mp_policy=policy)
    plant(model, "blocks.0", blueprint)
    before = copy.deepcopy(whole(model))
    learn(model, make_optimizer(model), slice(None))
    assert all(value.dtype is torch.float32 for value in before.values())
    moved = [name for name, value in whole(model).items() if not torch.equal(value, before[name])]
    assert any(name.startswith("slots") for name in moved)


@pytest.mark.usefixtures("alone")
def test_a_slot_behind_what_has_no_parameters_knows_its_host() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    model = esper.attach(net, {"1": ["mlp"]}, torch.zeros(2, WIDTH))
    fully_shard(net)
    with pytest.raises(SlotError, match="is a DTensor"):
        plant(model, "1", "mlp")
