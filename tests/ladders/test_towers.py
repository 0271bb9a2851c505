"""Which blocks of a model may be copied, and how it grows deeper in place."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.hosts import Block, TransformerBlock

import tiny_transformers
from esper.errors import ConfigError
from esper.growth.inputs import call_host
from esper.ladders.towers import Tower, count_blocks, deepen_in_place, find_towers, grow_towers, plan_copies
from ladders.small import Decoder, learn, make_optimizer, tokens

WORDS, IMAGES = torch.randint(11, (2, 6)), torch.rand(2, 3, 8, 8)


class Stages(nn.Module):
    """The residual stages of a ResNet: the first block of each but the first changes width and resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 8, 2), Block(8, 8, 1))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(images))).mean((2, 3)))


class Patches(nn.Module):
    """A ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)
        self.blocks = nn.Sequential(TransformerBlock(8, 2))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


class Encoder(nn.Module):
    """Torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.encoder(self.embed(words))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "gpt2": (lambda: tiny_transformers.gpt2(n_layer=1), {"input_ids": WORDS}, ["transformer.h"]),
    "llama": (lambda: tiny_transformers.llama(num_hidden_layers=1), {"input_ids": WORDS}, ["model.layers"]),
    "qwen2": (tiny_transformers.qwen2, {"input_ids": WORDS}, ["model.layers"]),
    "vit of Hugging Face": (tiny_transformers.vit, {"pixel_values": IMAGES}, ["vit.layers"]),
    "own decoder": (Decoder, WORDS, ["blocks"]),
    "own vit": (Patches, IMAGES, ["blocks"]),
    "torch's encoder": (Encoder, WORDS, ["encoder.layers"]),
    "residual stages": (Stages, IMAGES, ["layer1", "layer2"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_of_a_model_are_found_and_a_deeper_model_runs_its_copies(name: str) -> None:
    make, example, expected = MODELS[name]
    model = make().eval()
    towers = find_towers(model, example, None)
    if name == "vit of Hugging Face":  # named otherwise in other versions
        expected = [towers[0].name]
    assert [tower.name for tower in towers] == expected
    depth = 2 * count_blocks(towers)
    deepen_in_place(model, plan_copies(towers, depth))
    assert sum(len(list(model.get_submodule(tower.name).children())) for tower in towers) == depth

    called: list[nn.Module] = []
    for tower in towers:
        for block in model.get_submodule(tower.name).children():
            block.register_forward_hook(lambda module, *_: called.append(module))
    call_host(model, example)
    assert called == [block for tower in towers for block in model.get_submodule(tower.name).children()]


def test_what_changes_the_width_is_not_copied() -> None:
    towers = find_towers(Stages(), IMAGES, None)
    assert [tower.copyable for tower in towers] == [(True, True), (False, True)]
    assert plan_copies(towers, 8) == {"layer1": (1, 1), "layer2": (0, 2)}
    # Several lists grow by one factor.
    with pytest.raises(ConfigError, match="multiples of 4"):
        plan_copies(towers, 6 - 1)
    assert count_blocks(grow_towers(towers, plan_copies(towers, 12))) == 12


@pytest.mark.parametrize(
    ("copyable", "depth", "copies"),
    [
        ((True,), 4, (3,)),
        ((True, True), 4, (1, 1)),
        ((True, True), 3, (0, 1)),
        ((True, True, True), 5, (0, 1, 1)),
        ((False, True, False, True), 8, (0, 2, 0, 2)),
    ],
)
def test_copies_are_spread_evenly(copyable: tuple[bool, ...], depth: int, copies: tuple[int, ...]) -> None:
    tower = Tower("blocks", copyable)
    assert tower.count_copies(depth) == copies
    assert len(tower.grow(copies)) == depth
    assert sum(tower.grow(copies).copyable) == sum(copyable) + depth - len(copyable)


def test_a_copy_has_the_values_the_group_and_the_moments_of_its_block() -> None:
    model = Decoder(2)
    optimizer = make_optimizer(model)
    learn(model, optimizer, tokens())
    blocks = [copy.deepcopy(block) for block in model.blocks]
    moments = [[copy.deepcopy(optimizer.state[each]) for each in block.parameters()] for block in model.blocks]
    deepen_in_place(model, {"blocks": (1, 2)}, optimizer)
    for block, origin in zip(model.blocks, (0, 0, 1, 1, 1), strict=True):
        for parameter, like, state in zip(
            block.parameters(), blocks[origin].parameters(), moments[origin], strict=True
        ):
            assert torch.equal(parameter, like)
            assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())
    # As an optimizer that is made of the deeper model, so that its saved state fits.
    like = make_optimizer(model)
    for group, other in zip(optimizer.param_groups, like.param_groups, strict=True):
        assert all(one is two for one, two in zip(group["params"], other["params"], strict=True))
    states = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    assert len({state.data_ptr() for state in states}) == len(states)


def test_unclear_blocks_are_refused_and_can_be_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.ModuleList([TransformerBlock(8, 2)]), nn.ModuleList([Block(1, 1, 1)])

        def forward(self, features: Tensor) -> Tensor:
            return self.right[0](self.left[0](features)[:, None])

    with pytest.raises(ConfigError, match=r"there are several: 'left', 'right'.*blocks="):
        find_towers(Two(), torch.rand(2, 4, 8), None)
    assert [tower.name for tower in find_towers(Two(), torch.rand(2, 4, 8), ["right"])] == ["right"]
    with pytest.raises(ConfigError, match="'rigth' .*did you mean 'right'"):
        find_towers(Two(), torch.rand(2, 4, 8), ["rigth"])
    with pytest.raises(ConfigError, match="none was found"):
        find_towers(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.rand(2, 3), None)

    class Backwards(Decoder):
        def forward(self, indices: Tensor) -> Tensor:
            hidden = self.embed(indices)
            for block in reversed(self.blocks):
                hidden = block(hidden)
            return self.head(hidden)

    with pytest.raises(ConfigError, match="none was found"):
        find_towers(Backwards(2), WORDS, None)
    with pytest.raises(ConfigError, match="not called once each"):
        find_towers(Backwards(2), WORDS, ["blocks"])
