"""A probe forward finds every site's layout, and refuses what cannot carry a slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.errors import SlotError
from esper.growth.probe import probe
from esper.growth.site import Layout, Site


class Stem(nn.Module):
    """A convolution, an activation, and a linear layer over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 6, 3, padding=1), nn.ReLU())
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(inputs)).mean(-1))


class Largest(nn.Module):
    """Integers."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.argmax(-1, keepdim=True)


class Awkward(nn.Module):
    """Everything a slot cannot sit on."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.alias = self.twice
        self.unused = nn.Linear(4, 4)
        self.by_weight = nn.Linear(4, 4)
        self.pair = nn.LSTM(4, 4, batch_first=True)
        self.scalar = nn.Flatten(0)
        self.largest = Largest()
        self.time_first = nn.Sequential()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.twice(self.twice(inputs))
        hidden = F.linear(hidden, self.by_weight.weight)
        sequence, _ = self.pair(hidden.unsqueeze(1))
        self.scalar(hidden)
        self.largest(hidden)
        self.time_first(sequence.transpose(0, 1))
        return sequence.squeeze(1)


@pytest.mark.parametrize(
    ("host", "name", "shape", "site"),
    [
        (nn.Sequential(nn.Linear(5, 7)), "0", (5,), Site(Layout.FEATURES, 7, (), (5,))),
        (nn.Sequential(nn.Linear(5, 7)), "0", (9, 5), Site(Layout.TOKENS, 7, (9,), (9, 5), causal=True)),
        (nn.Sequential(nn.LayerNorm(5)), "0", (9, 5), Site(Layout.TOKENS, 5, (9,), (9, 5), causal=True)),
        (nn.Sequential(nn.Conv1d(2, 7, 3)), "0", (2, 9), Site(Layout.SEQUENCE, 7, (7,), (2, 9))),
        (nn.Sequential(nn.Conv2d(3, 7, 3)), "0", (3, 8, 6), Site(Layout.IMAGE, 7, (6, 4), (3, 8, 6))),
        (Stem(), "conv", (1, 10), Site(Layout.SEQUENCE, 6, (10,), (1, 10))),
        (Stem(), "conv.1", (1, 10), Site(Layout.TOKENS, 10, (6,), (1, 10))),
        (Stem(), "norm", (1, 10), Site(Layout.SEQUENCE, 6, (10,), (1, 10))),
        (Stem(), "head", (1, 10), Site(Layout.FEATURES, 3, (), (1, 10))),
    ],
)
def test_layouts(host: nn.Module, name: str, shape: tuple[int, ...], site: Site) -> None:
    # An activation alone does not show which axis holds channels: `conv.1` is read as tokens, `conv` is not.
    assert probe(host, [name], torch.zeros(2, *shape)).sites == {name: site}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["by_wieght"], r"no submodule 'by_wieght'; did you mean 'by_weight'"),
        (["quite_elsewhere"], r"no submodule 'quite_elsewhere'; print\(model\) shows the names"),
        ([""], "needs the name of a submodule, not ''"),
        (["unused", "unused"], "'unused' is listed twice"),
        (["twice", "alias"], "'alias' and 'twice' are the same module"),
        (["unused"], "'unused' was never called"),
        (["by_weight"], "'by_weight' was never called"),
        (["twice"], "'twice' runs 2 times in one forward pass"),
        (["pair"], "'pair' returns a tuple; a slot needs a single tensor"),
        (["scalar"], r"'scalar' returns shape \(8,\); a slot needs features \[B, D\]"),
        (["largest"], "'largest' returns torch.int64 values; a slot needs floating-point features"),
        (["time_first"], r"'time_first' returns shape \(1, 2, 4\) for a batch of 2; .* batch_first=True"),
    ],
)
def test_what_cannot_carry_a_slot_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(SlotError, match=message):
        probe(Awkward(), names, torch.zeros(2, 4))


def test_the_host_is_left_as_it_was() -> None:
    host = Stem().train()
    before = {name: tensor.clone() for name, tensor in host.state_dict().items()}
    probe(host, ["conv", "head"], torch.randn(4, 1, 10, generator=torch.Generator().manual_seed(0)))
    assert host.training
    assert all(torch.equal(before[name], tensor) for name, tensor in host.state_dict().items())
    assert not any(module._forward_hooks for module in host.modules())


def test_a_host_that_fails_keeps_no_hook() -> None:
    host = Stem()
    with pytest.raises(RuntimeError):
        probe(host, ["conv"], torch.zeros(2, 3, 10))
    assert host.training
    assert not any(module._forward_hooks for module in host.modules())


@pytest.mark.parametrize("shape", [(), (1, 4)])
def test_one_example_alone_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SlotError, match="give a batch of 2 examples or more, batch first"):
        probe(Awkward(), ["by_weight"], torch.zeros(shape))


@pytest.mark.parametrize(
    ("outputs", "classes"), [((4,), 4), ((7, 4), 4), ((4, 6, 5), 4)], ids=["classes", "tokens", "pixels"]
)
def test_the_channels_of_outputs(outputs: tuple[int, ...], classes: int) -> None:
    host = nn.Sequential(nn.Identity(), nn.Identity())
    assert probe(host, ["0"], torch.zeros(2, *outputs)).outputs == classes


def test_mixed_modes_are_kept() -> None:
    host = Stem().train()
    host.norm.eval()  # as where the statistics of a normalisation are frozen
    probe(host, ["conv"], torch.zeros(2, 1, 10))
    assert host.training
    assert host.conv.training
    assert not host.norm.training
