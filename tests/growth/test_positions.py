"""What grows on tokens treats each position separately unless named; with masks and caches it is refused."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import tiny_transformers
from esper.errors import CheckpointError, SlotError
from esper.growth.attach import attach
from esper.growth.blueprints.registry import Blueprint, get, names
from esper.growth.inputs import find_mask_or_cache
from esper.growth.persist import load, save
from esper.growth.site import CHANNELS_LAST, Layout, Site
from factories import fossilize, plant
from growth.blueprint_cases import SITES, batch, every_case, grown
from growth.padded_hosts import (
    BERT,
    EXAMPLES,
    GPT2,
    HAND_MADE,
    TOKENS,
    TORCH,
    WIDTH,
    PaddedHost,
    TorchEncoder,
    every_padded_host,
    numbers,
    outputs,
    text,
)

FREE = sorted(name for name in names() if Layout.TOKENS in get(name).layouts and not get(name).mixes_positions)
MIXING = sorted(name for name in names() if Layout.TOKENS in get(name).layouts and get(name).mixes_positions)


HOST_OF_LAYOUT = {
    Layout.TOKENS: lambda: nn.Sequential(nn.Linear(5, 6)),
    Layout.SEQUENCE: lambda: nn.Sequential(nn.Conv1d(5, 6, 1)),
    Layout.IMAGE: lambda: nn.Sequential(nn.Conv2d(5, 6, 1)),
}


@every_case
def test_a_blueprint_says_whether_it_mixes_positions(kind, site):
    """Found out by changing one position at a time."""
    seed = grown(kind, site)
    features, inputs = batch(site)
    channels = -1 if site.layout in (Layout.FEATURES, Layout.TOKENS) else 1
    before = seed(features, inputs).movedim(channels, -1).reshape(len(features), site.positions, -1)
    mixes = False
    for position in range(site.positions):
        changed = features.movedim(channels, -1).reshape(len(features), site.positions, -1).clone()
        changed[:, position] += 1.0
        shaped = changed.reshape(len(features), *site.extent, site.width).movedim(-1, channels)
        after = seed(shaped, inputs).movedim(channels, -1).reshape(before.shape)
        rest = torch.arange(site.positions) != position
        mixes |= not torch.allclose(before[:, rest], after[:, rest])
    if site.positions > 1:
        assert kind.mixes_positions is mixes


@pytest.mark.parametrize("site", [site for site in SITES if site.positions > 1], ids=str)
def test_auto_mixes_images_and_signals_but_no_tokens(site: Site) -> None:
    host = HOST_OF_LAYOUT[site.layout]
    shape = (4, 5) if site.layout in CHANNELS_LAST else (5, *[4] * len(site.extent))
    for causal in (False, True):
        slot = attach(host(), ["0"], torch.zeros(2, *shape), causal=causal).slots["0"]
        mixing = any(get(name).mixes_positions for name in slot.blueprints)
        assert mixing is (site.layout is not Layout.TOKENS)


def test_a_blueprint_that_says_nothing_is_taken_to_mix():
    assert Blueprint.mixes_positions


@every_padded_host
@pytest.mark.parametrize("name", [*FREE, *MIXING])
def test_padding_changes_nothing_or_the_blueprint_is_refused(host: PaddedHost, name: str) -> None:
    free = host.attached()
    for slot in host.slots:
        if name in MIXING:
            assert name not in free.slots[slot].blueprints
            with pytest.raises(SlotError, match=f"'{name}' in slot {slot!r} mixes positions, .* uses '.*separately"):
                attach(host.network(), {slot: [name]}, host.unpadded(), causal=False)
        elif name in free.slots[slot].blueprints:
            model = host.attached()
            without = outputs(model, host.unpadded())
            plant(model, slot, name)
            returned = outputs(model, host.unpadded())
            torch.testing.assert_close(outputs(model, host.padded()), returned)
            assert not torch.allclose(returned, without, atol=1e-3)


def test_a_cache_is_refused_while_attention_lives_and_its_absence_is_not() -> None:
    slot, arguments = GPT2.slots[0], {"input_ids": text(), "use_cache": False}
    model = attach(GPT2.network(), {slot: ["attention"]}, arguments).eval()
    plant(model, slot, "attention")
    model(**arguments, labels=text())
    for cached in ({"use_cache": True}, {}):  # the second by the model's configuration
        with pytest.raises(SlotError, match="'attention' in slot 'transformer.h.0' mixes .* cache"):
            model(input_ids=text(), **cached)
    with pytest.raises(SlotError, match="'attention' in slot 'transformer.h.0' mixes .* cache"):
        model.host.generate(text(), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("slot", [*TORCH.slots, "encoder", "encoder.layers.1.linear2"])
@pytest.mark.parametrize("name", FREE)
def test_plain_is_grown_at_real_positions(name: str, slot: str) -> None:
    model = attach(TORCH.network(), [slot], TORCH.unpadded())
    if name not in model.slots[slot].blueprints:
        return
    fossilize(model, slot, name)
    plain = model.finalize()
    for training, gradient, longest in itertools.product([True, False], [True, False], [TOKENS, TOKENS - 1]):
        lengths = longest - 2 * torch.arange(EXAMPLES)
        arguments = {"tokens": numbers(), "padding": torch.arange(TOKENS) >= lengths[:, None]}
        with torch.set_grad_enabled(gradient):
            returned, expected = (each.train(training)(**arguments) for each in (plain, model))
        torch.testing.assert_close(returned[~arguments["padding"]], expected[~arguments["padding"]])


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("host", [TORCH, HAND_MADE], ids=lambda host: host.name)
def test_padding_that_nobody_expected_is_refused_where_seeds_mix(host: PaddedHost, name: str) -> None:
    """The example input had no mask."""
    slot = host.slots[0]
    model = attach(host.network(), {slot: [name]}, host.whole(), causal=False).eval()
    plant(model, slot, name)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            outputs(model, host.whole())
            with pytest.raises(SlotError, match=f"'{name}' in slot .* mixes positions, .*{host.mask}"):
                outputs(model, some_padding(host))
    model.slots[slot].prune()
    outputs(model, some_padding(host))


@pytest.mark.parametrize(
    "name", ["padding_mask", "attention_mask", "src_mask", "lengths", "past", "cache", "use_cache"]
)
@pytest.mark.parametrize("of_layer", [False, True])
def test_each_mask_and_cache_is_found_by_name(name: str, of_layer: bool) -> None:
    value = True if name == "use_cache" else torch.ones(EXAMPLES, TOKENS)
    slot, host = ("inner", Handing(name)) if of_layer else ("inner.0", Handed(name))
    refused = f"'attention' in slot {slot!r} mixes positions, .* uses {name!r}"
    model = attach(host, {slot: ["attention"]}, numbers(), causal=False)
    model(numbers())
    plant(model, slot, "attention")
    model(numbers(), **{name: None})
    model(numbers(), **{name: False})
    with pytest.raises(SlotError, match=refused):
        model(numbers(), **{name: value})
    host = Handing(name) if of_layer else Handed(name)
    with pytest.raises(SlotError, match=refused):
        attach(host, {slot: ["attention"]}, {"tokens": numbers(), name: value}, causal=False)


class Handed(nn.Module):
    """A model whose call has an argument of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.name = nn.Sequential(nn.Linear(WIDTH, WIDTH)), name

    def forward(self, tokens: Tensor, **keywords: Any) -> Tensor:
        return self.inner(tokens)


class Handing(Handed):
    """A model whose layer gets it, by a name that is not in the call of the model."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inner = Handed(name)

    def forward(self, tokens: Tensor, **keywords: Any) -> Tensor:
        return self.inner(tokens, **keywords)


def test_nested_tensors_are_refused_with_what_to_do() -> None:
    """Without gradients torch's encoder makes padded examples a nested tensor, unless it is told not to."""
    refused = r"returns nested tensors: build torch's TransformerEncoder with enable_nested_tensor=False"
    padded = some_padding(TORCH)
    with pytest.raises(SlotError, match=refused):
        attach(TorchEncoder(nested=True), ["encoder.layers.0"], padded)
    model = attach(TorchEncoder(nested=True), ["encoder.layers.0"], {"tokens": numbers()}).eval()
    with torch.no_grad():
        model(**padded)
        plant(model, "encoder.layers.0", "mlp")
        with pytest.raises(SlotError, match=refused):
            model(**padded)


def some_padding(host: PaddedHost) -> dict[str, Tensor]:
    """Arguments of the probe's length whose last tokens are masked in all examples but the first."""
    arguments = host.unpadded()
    assert host.mask is not None
    mask = arguments[host.mask].clone()
    mask[1:, -2:] = torch.tensor(host.masked).to(mask)
    return {**arguments, host.mask: mask}


def test_scripted_submodules_are_let_alone() -> None:
    host = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    attach(host, {"0": ["attention"]}, torch.zeros(2, 3, 4))


def test_images_are_not_padded() -> None:
    """Although the model could take an ``attention_mask``, too."""
    attach(tiny_transformers.vit(), {"vit.layers.0": ["attention"]}, {"pixel_values": torch.zeros(2, 3, 8, 8)})


class Wrapped(nn.Module):
    """A model of a user's around another one, with a signature without masks."""

    def __init__(self, inner: nn.Module, **options: bool) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, *arguments: Tensor, **keywords: Tensor) -> Tensor:
        return self.inner(*arguments, **keywords, **self.options).logits


@pytest.mark.parametrize(
    ("host", "arguments", "options", "found"),
    [
        (BERT, BERT.unpadded(), {}, "padding_idx"),
        (BERT, text(), {}, "padding_idx"),
        (GPT2, text(), {}, "cache"),
        (
            GPT2,
            {"input_ids": text(), "attention_mask": torch.ones_like(text())},
            {"use_cache": False},
            "attention_mask",
        ),
        (GPT2, text(), {"use_cache": False}, ""),
    ],
)
def test_what_a_model_does_shows_through_a_wrapper(
    host: PaddedHost, arguments: Any, options: dict[str, bool], found: str
) -> None:
    slot = f"inner.{host.slots[0]}"
    with pytest.raises(SlotError, match=f"uses {found!r}") if found else nullcontext():
        attach(Wrapped(host.network(), **options), {slot: ["attention"]}, arguments)


class Packing(nn.Module):
    """Tells a recurrent network how long its examples are."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        counts = torch.full((len(tokens),), tokens.shape[1])
        packed = pack_padded_sequence(self.projection(tokens), counts, batch_first=True)
        return self.reader(packed)[1]


class ByLength(Packing):
    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.reader(self.projection(tokens))[1] if lengths is None else super().forward(tokens)


def test_recurrent_networks_know_lengths() -> None:
    with pytest.raises(SlotError, match="uses 'input'"):  # of the GRU
        attach(Packing(), {"projection": ["attention"]}, numbers())
    model = attach(ByLength(), {"projection": ["attention"]}, numbers())
    plant(model, "projection", "attention")
    model(numbers())
    with pytest.raises(SlotError, match="uses 'lengths'"):
        model(numbers(), torch.full((EXAMPLES,), TOKENS))


class Ordered(nn.Module):
    """Keeps tokens from later ones by a mask, as torch's layers want it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        order = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.layer(tokens, src_mask=order)


@pytest.mark.parametrize("tokens", [EXAMPLES, TOKENS])
def test_a_mask_of_order_is_none_of_padding(tokens: int) -> None:
    inputs = torch.randn(EXAMPLES, tokens, WIDTH)
    model = attach(Ordered(), {"layer": ["attention"]}, inputs)
    assert model.slots["layer"].site.causal
    plant(model, "layer", "attention")
    model(inputs)


def test_a_saved_model_that_mixes_positions_does_not_load_where_padding_is_masked(tmp_path: Path) -> None:
    slot = TORCH.slots[0]
    model = attach(TORCH.network(), {slot: ["attention"]}, TORCH.whole())
    plant(model, slot, "attention")
    save(model, tmp_path)
    load(tmp_path, TORCH.network(), TORCH.whole())
    with pytest.raises(CheckpointError, match="'attention' in slot .* mixes positions"):
        load(tmp_path, TORCH.network(), TORCH.padded())


def test_a_finalized_model_cannot_check_its_calls_and_says_so() -> None:
    slot = TORCH.slots[0]
    model = attach(TORCH.network(), {slot: ["attention", "mlp"]}, TORCH.whole())
    fossilize(model, slot, "attention")
    with pytest.warns(UserWarning, match=f"mixed at {slot!r}, .* call it without padding"):
        model.finalize()


class FromNested(nn.Module):
    """Means over the rows of a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: Tensor, several: Tensor) -> Tensor:
        return self.layer(rows + torch.stack([part.mean(0) for part in several.unbind()]))


def test_a_nested_argument_is_a_sign_of_padding() -> None:
    several = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    model = attach(FromNested(), {"layer": ["mlp"]}, (torch.randn(2, 4), several))
    assert model(torch.randn(2, 4), several).shape == (2, 3)
    assert find_mask_or_cache(("rows", "several"), (torch.randn(2, 4), several), {}, 2) == "several"
