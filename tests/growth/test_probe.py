"""A probe forward finds every site's layout, and refuses what cannot carry a slot."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.errors import SlotError
from esper.growth import slot
from esper.growth.attach import Places, attach
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
        self.state = nn.GRU(4, 4, batch_first=True)
        self.scalar = nn.Flatten(0)
        self.largest = Largest()
        self.time_first = nn.Sequential()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.twice(self.twice(inputs))
        hidden = F.linear(hidden, self.by_weight.weight)
        sequence, _ = self.pair(hidden.unsqueeze(1))
        _, state = self.state(sequence)
        self.scalar(hidden)
        self.largest(hidden)
        self.time_first(sequence.transpose(0, 1))
        return sequence.squeeze(1) + state[-1]


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
        (["twice", "alias"], "'alias' and 'twice' are the same module"),
        (["unused"], r"'unused' was never called.*self\.grow = nn\.Identity\(\)"),
        (["by_weight"], "'by_weight' was never called"),
        (["twice"], "'twice' runs 2 times in one forward pass.*attach to that part alone"),
        (["state"], "'state' returns a tuple, and the model's output does not depend on its first element"),
        (["scalar"], r"'scalar' returns shape \(8,\); a slot needs features \[B, D\]"),
        (["largest"], "'largest' returns torch.int64 values; a slot needs floating-point features"),
        (
            ["time_first"],
            r"'time_first' returns shape \(1, 2, 4\) for a batch of 2; .* batch_first=True.*an expert or a stack",
        ),
    ],
)
def test_what_cannot_carry_a_slot_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(SlotError, match=message):
        probe(Awkward(), names, torch.zeros(2, 4))


class Attending(nn.Module):
    """Attention whose last layer is used by its weights alone, in a block that returns more than features."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.block, self.head = block(), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(tokens))


class ByTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens, tokens, tokens)[0]


class TimeFirst(ByTuple):
    """Of attention that has no batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("block", "asked", "advised"),
    [
        (ByTuple, "block.attention.out_proj", "block.attention"),
        (TimeFirst, "block.attention.out_proj", "block"),
        (TimeFirst, "block.attention", "block"),
    ],
)
def test_the_advised_submodule_carries_a_slot(block: type[nn.Module], asked: str, advised: str) -> None:
    host, example = Attending(block), torch.randn(2, 5, 4)
    with pytest.raises(SlotError, match=f"{asked}'.*; name a submodule around it or within it"):
        attach(host, [asked], example)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())
    model = attach(host, [advised], example)
    before = model(example)
    model.slots[advised].germinate("lowrank", torch.Generator().manual_seed(0), alpha=1.0)
    model(example).square().sum().backward()
    seed = model.seeds[advised]
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in seed.parameters())
    torch.testing.assert_close(model(example), before)


class Headless(nn.Module):
    """Ends in a layer that is still zero, so that nothing changes its output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(4, 6, batch_first=True), nn.Linear(6, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(tokens)[0].mean(1))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_tuple_that_is_read_carries_a_slot_though_the_head_is_zero(kind: type[nn.RNNBase]) -> None:
    site = probe(Headless(kind), ["layer"], torch.zeros(2, 5, 4)).sites["layer"]
    assert (site.layout, site.shape) == (Layout.TOKENS, (5, 6))


def test_the_host_is_left_as_it_was() -> None:
    host = Stem().train()
    host.norm.eval()  # as where the statistics of a normalisation are frozen
    before = {name: tensor.clone() for name, tensor in host.state_dict().items()}
    probe(host, ["conv", "head"], torch.randn(4, 1, 10, generator=torch.Generator().manual_seed(0)))
    assert (host.training, host.conv.training, host.norm.training) == (True, True, False)
    assert all(torch.equal(before[name], tensor) for name, tensor in host.state_dict().items())
    assert not any(module._forward_hooks for module in host.modules())


class Leaky(nn.Module):
    """Keeps a hidden state in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.hidden: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.hidden = self.layer(inputs) if self.hidden is None else self.layer(inputs) + self.hidden / 2
        self.calls = 1
        return self.hidden


def test_a_state_in_plain_attributes_is_what_it_was_before_attach() -> None:
    host = nn.Sequential(Leaky(), nn.ReLU(), nn.Linear(3, 2))
    model = attach(host, {"0": ["norm"]}, torch.randn(4, 3))
    assert vars(host[0])["hidden"] is None
    assert "calls" not in vars(host[0])
    assert model(torch.randn(7, 3)).shape == (7, 2)


def test_a_host_that_fails_keeps_no_hook() -> None:
    host = Stem()
    with pytest.raises(SlotError, match="cannot run"):
        probe(host, ["conv"], torch.zeros(2, 3, 10))
    with pytest.raises(SlotError, match="'conv3x3' does not support"):
        attach(host, {"conv": "auto", "head": ["conv3x3"]}, torch.zeros(2, 1, 10))
    assert host.training
    assert not any(module._forward_hooks for module in host.modules())


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.zeros(2, 3, 10), r"Stem cannot run on the example input \[\(2, 3, 10\) torch.float32 on cpu\]"),
        (torch.zeros(2, 1, 10, dtype=torch.float64), r"float64 on cpu\]: .*parameters \(torch.float32 on cpu\) need"),
        ((torch.zeros(2, 1, 10), torch.zeros(2)), r"\(2,\) torch.float32 on cpu\]: .*without labels"),
        ({"images": torch.zeros(2, 1, 10)}, r"\[images: \(2, 1, 10\) .*'images'"),
    ],
    ids=["shape", "type", "labels", "keyword"],
)
def test_an_example_that_the_host_does_not_take_is_refused(example: Any, words: str) -> None:
    with pytest.raises(SlotError, match=words):
        probe(Stem(), ["conv"], example)


def test_an_example_without_a_batch_axis_is_refused() -> None:
    with pytest.raises(SlotError, match=r"input has shape \(8,\): if that is one example, give a batch of 2 or more"):
        probe(nn.Sequential(nn.Linear(8, 6)), ["0"], torch.zeros(8))


def test_a_recurrent_layer_that_returns_packed_sequences_is_refused() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 6, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(tokens, torch.full((len(tokens),), 3), batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]

    with pytest.raises(SlotError, match="a tuple that begins with a PackedSequence; .*pad_packed_sequence returns"):
        probe(Packed(), ["gru"], torch.zeros(2, 3, 4))


@pytest.mark.parametrize("shape", [(), (1, 4)])
def test_one_example_alone_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SlotError, match="give a batch of 2 examples or more, batch first"):
        probe(Awkward(), ["by_weight"], torch.zeros(shape))


@pytest.mark.parametrize(
    ("outputs", "classes"), [((4,), 4), ((7, 4), 4), ((4, 6, 5), 4)], ids=["classes", "tokens", "pixels"]
)
def test_the_channels_of_outputs(outputs: tuple[int, ...], classes: int) -> None:
    host = nn.Sequential(nn.Identity(), nn.Identity())
    assert attach(host, ["0"], torch.zeros(2, *outputs)).outputs == classes


# Errors of `esper.attach`, with advice.


def network() -> nn.Module:
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.ModuleDict({"blocks": blocks})["blocks"]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({}, "no slots: name the submodules"),
        ("2", r"^slots is a str, '2': give a list of submodules' names, such as \['layer2'\], or a mapping from names"),
        (["2"], r"no submodule '2'"),
        (["re:block9"], r"'re:block9' matches no whole name of a submodule; print\(model\) shows the names"),
        (["re:("], "'re:\\(' is not a valid regular expression"),
        (["0", "re:."], "'re:.' matches submodule '0', which already has a slot"),
        ({"0": "mlp"}, "the blueprints of slot '0' are 'mlp': give a list of names, or 'auto'"),
        ({"0": []}, r"no blueprint was named for the features \(4,\) at slot '0'; those that do are .*mlp"),
        ({"0": ["conv3x3"]}, r"'conv3x3' does not support the features \(4,\) at slot '0'; those that do are .*mlp"),
    ],
)
def test_places_that_make_no_sense(places: Places, message: str) -> None:
    with pytest.raises(SlotError, match=message):
        attach(network(), places, torch.zeros(2, 4))


def test_a_pattern_stands_for_whole_names() -> None:

    def nested() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))

    assert list(attach(nested(), [r"re:\d"], torch.zeros(2, 4)).slots) == ["0", "1"]
    assert list(attach(nested(), [r"re:0\..*"], torch.zeros(2, 4)).slots) == ["0.0", "0.1"]
    with pytest.raises(
        SlotError, match=r"matches no whole name .*; it matches part of '0\.1': add '\.\*' for the rest"
    ):
        attach(nested(), [r"re:\.1"], torch.zeros(2, 4))


class Layers(nn.Module):
    """Two layers of three projections; the second lacks one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(OrderedDict(q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4))),
            nn.Sequential(OrderedDict(q=nn.Linear(4, 4), k=nn.Linear(4, 4))),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_summary_says_how_many_submodules_each_pattern_matched(frozen: bool) -> None:
    if frozen:
        model = attach(Layers(), ["layers.1"], torch.zeros(2, 4), freeze_host=[r"re:.*\.(q|w)", "layers.0.k"])
    else:
        model = attach(Layers(), [r"re:.*\.(q|w)", "layers.0.k"], torch.zeros(2, 4))
    assert model.summary().matches == {r"re:.*\.(q|w)": 2}
    assert r"'re:.*\\.(q|w)' matched 2 submodules" in str(model.summary())


def test_a_slot_at_which_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "for_site", lambda site: ())
    with pytest.raises(SlotError, match=r"no blueprint supports the features \(4,\) at slot '0'; register one of your"):
        attach(network(), {"0": "auto"}, torch.zeros(2, 4))


def test_an_example_without_a_tensor() -> None:
    with pytest.raises(SlotError, match="the example input contains no tensor"):
        attach(network(), ["0"], ())
