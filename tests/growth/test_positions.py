"""What grows where padding is masked or the past is cached keeps positions apart, or is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import tiny_transformers
from esper.errors import SlotError
from esper.growth.attach import attach
from esper.growth.blueprints.registry import Blueprint, get, names
from esper.growth.persist import TOPOLOGY_FILE, load, save
from esper.growth.site import Layout
from growth.blueprint_cases import SITES, batch, every_case, grown
from growth.growing import fossilize, plant
from growth.hosts import HOSTS, Host
from growth.padded_hosts import (
    BERT,
    EXAMPLES,
    GPT2,
    HAND_MADE,
    TOKENS,
    TORCH,
    WIDTH,
    PaddedHost,
    every_padded_host,
    numbers,
    outputs,
    text,
)

FREE = sorted(name for name in names() if Layout.TOKENS in get(name).layouts and not get(name).mixes_positions)
MIXING = sorted(name for name in names() if Layout.TOKENS in get(name).layouts and get(name).mixes_positions)


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
        others = torch.arange(site.positions) != position
        mixes |= not torch.allclose(before[:, others], after[:, others])
    if site.positions > 1:
        assert kind.mixes_positions is mixes


@pytest.mark.parametrize("name", names())
def test_only_what_keeps_positions_apart_serves_where_they_are(name):
    kind = get(name)
    for site in SITES:
        assert kind.supports(replace(site, apart="a test says so")) is (
            kind.supports(site) and not kind.mixes_positions
        )


def test_a_blueprint_that_says_nothing_is_taken_to_mix():
    assert Blueprint.mixes_positions


@every_padded_host
@pytest.mark.parametrize("name", [*FREE, *MIXING])
def test_padding_changes_nothing_or_the_blueprint_is_withheld(host: PaddedHost, name: str) -> None:
    free = host.attached()
    for slot in host.slots:
        assert name not in MIXING or name not in free.slots[slot].blueprints
        if name in MIXING:
            sentence = f"'{name}' does not serve .* slot {slot!r}, where positions must stay apart since .* apart=False"
            with pytest.raises(SlotError, match=sentence):
                attach(host.network(), {slot: [name]}, host.unpadded())
            with pytest.raises(SlotError, match=sentence):
                free.slots[slot].germinate(name)
        elif name in free.slots[slot].blueprints:
            model = host.attached()
            without = outputs(model, host.unpadded())
            plant(model, slot, name)
            with torch.set_grad_enabled(host is not TORCH):  # there the batch is a nested tensor
                found = outputs(model, host.unpadded())
                torch.testing.assert_close(outputs(model, host.padded()), found)
            assert not torch.allclose(found, without, atol=1e-3)


@every_padded_host
def test_a_leak_would_be_seen(host: PaddedHost) -> None:
    """Attention that no slot knows of lets padding in, and the test above would notice."""
    model = host.attached()
    slot = model.slots[host.slots[0]]
    attention = grown(get("attention"), replace(slot.site, apart="", causal=False)).float()
    slot.occupant = lambda features, inputs: features + attention(features, inputs)
    assert not torch.allclose(outputs(model, host.padded()), outputs(model, host.unpadded()), atol=1e-3)


def generated(network: nn.Module, **options: bool) -> Tensor:
    """Logits of the tokens that the network adds to the text."""
    found = network.generate(
        text(),
        attention_mask=torch.ones_like(text()),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return torch.stack(found.logits)


@pytest.mark.landing
@pytest.mark.parametrize("name", FREE)
def test_cached_generation_is_uncached_generation(name: str) -> None:
    for slot in GPT2.slots:
        model = GPT2.attached()
        if name in model.slots[slot].blueprints:
            fossilize(model, slot, name)
            plain = model.finalize().eval()
            expected = generated(model.host, use_cache=False)
            assert not torch.allclose(expected[:1], generated(GPT2.network(), use_cache=False)[:1], atol=1e-3)
            for network in (model.host, plain):
                torch.testing.assert_close(generated(network), expected)


def test_a_cache_is_refused_while_attention_lives_and_its_absence_is_not() -> None:
    model = GPT2.attached({"input_ids": text()}, apart=False)
    plant(model, GPT2.slots[0], "attention")
    generated(model.host, use_cache=False)
    model(input_ids=text(), labels=text(), use_cache=True)
    with pytest.raises(SlotError, match="'attention' in slot 'transformer.h.0' mixes .* cache, '"):
        generated(model.host)


def ragged_padding(longest: int) -> Tensor:
    """Bool ``[B, T]``: the first example has ``longest`` tokens, each later one two fewer."""
    return torch.arange(TOKENS) >= (longest - 2 * torch.arange(EXAMPLES)).unsqueeze(1)


@pytest.mark.parametrize("slot", [*TORCH.slots, "encoder", "encoder.layers.1.linear2"])
@pytest.mark.parametrize("name", FREE)
def test_plain_is_grown_at_real_positions(name: str, slot: str) -> None:
    """In eval mode and without gradients torch's encoder makes the padded examples a nested tensor."""
    model = attach(TORCH.network(), [slot], TORCH.unpadded())
    if name not in model.slots[slot].blueprints:
        return
    fossilize(model, slot, name)
    plain = model.finalize()
    for training, gradient, longest in itertools.product([True, False], [True, False], [TOKENS, TOKENS - 1]):
        arguments = {"tokens": numbers(), "padding": ragged_padding(longest)}
        with torch.set_grad_enabled(gradient):
            found, expected = (each.train(training)(**arguments) for each in (plain, model))
        torch.testing.assert_close(found[~arguments["padding"]], expected[~arguments["padding"]])


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("host", [TORCH, HAND_MADE, BERT], ids=lambda host: host.name)
def test_padding_that_nobody_expected_is_refused_where_seeds_mix(host: PaddedHost, name: str) -> None:
    """The example input had no mask, and the model does not say that it takes one, or its owner that it never will."""
    model = host.attached(host.whole(), apart=False if host.named else None)
    plant(model, host.slots[0], name)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            expected = outputs(model, host.whole())
            torch.testing.assert_close(outputs(model, host.unpadded()), expected)
            with pytest.raises(SlotError, match=f"'{name}' in slot .* mixes positions, .* mask of padding: prune"):
                outputs(model, some_padding(host))
    model.slots[host.slots[0]].prune()
    outputs(model, some_padding(host))


def some_padding(host: PaddedHost) -> dict[str, Tensor]:
    """Arguments of the probe's length whose last tokens are masked in all examples but the first."""
    arguments = host.unpadded()
    assert host.mask is not None
    mask = arguments[host.mask].clone()
    mask[1:, -2:] = torch.tensor(host.masked).to(mask)
    return {**arguments, host.mask: mask}


@pytest.mark.landing
@pytest.mark.parametrize("host", [TORCH, HAND_MADE], ids=lambda host: host.name)
def test_seeds_that_mix_compile_with_a_mask(host: PaddedHost) -> None:
    model = host.attached(apart=False)
    plant(model, host.slots[0], "attention")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(outputs(compiled, host.unpadded()), outputs(model, host.unpadded()))


@pytest.mark.parametrize(
    "host", [each if isinstance(each, Host) else each.values[0] for each in HOSTS], ids=lambda host: host.name
)
def test_what_masks_nothing_and_caches_nothing_may_grow_anything(host: Host) -> None:
    if host.name != "gpt2":
        apart = {bool(slot.site.apart) for slot in host.attached().slots.values()}
        assert apart == {host.name.startswith("encoder")}


def test_scripted_and_compiled_submodules_are_let_alone() -> None:
    scripted, compiled = torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4)
    compiled.compile(backend="eager", fullgraph=True)
    model = attach(nn.Sequential(nn.Linear(4, 4), scripted, compiled), ["0"], torch.zeros(2, 3, 4))
    assert not model.slots["0"].site.apart


def test_images_are_not_padded() -> None:
    """Although the model could take an ``attention_mask``, too."""
    model = attach(tiny_transformers.vit(), ["vit.layers.0"], {"pixel_values": torch.zeros(2, 3, 8, 8)})
    assert "attention" in model.slots["vit.layers.0"].blueprints


class Wrapped(nn.Module):
    """A model of its owner's around another one, which says nothing of what that takes."""

    def __init__(self, inner: nn.Module, **options: bool) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, *arguments: Tensor, **keywords: Tensor) -> Tensor:
        return self.inner(*arguments, **keywords, **self.options).logits


@pytest.mark.parametrize(
    ("host", "arguments", "options", "reason"),
    [
        (BERT, BERT.unpadded(), {}, "takes 'attention_mask'"),
        (BERT, text(), {}, "padding index 0"),
        (GPT2, text(), {}, "given a cache, "),
        (GPT2, text(), {"use_cache": False}, ""),
    ],
)
def test_what_a_model_does_shows_through_a_wrapper(
    host: PaddedHost, arguments: Any, options: dict[str, bool], reason: str
) -> None:
    slot = f"inner.{host.slots[0]}"
    site = attach(Wrapped(host.network(), **options), [slot], arguments).slots[slot].site
    assert reason in site.apart if reason else not site.apart


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


@pytest.mark.parametrize(("kind", "reason"), [(Packing, "packed sequences"), (ByLength, "takes 'lengths'")])
def test_recurrent_networks_know_lengths(kind: type[nn.Module], reason: str) -> None:
    assert reason in attach(kind(), ["projection"], numbers()).slots["projection"].site.apart


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
    model = attach(Ordered(), ["layer"], torch.randn(EXAMPLES, tokens, WIDTH))
    assert model.slots["layer"].site.causal
    assert not model.slots["layer"].site.apart


@pytest.mark.parametrize("apart", [None, True, False])
def test_a_saved_model_keeps_what_its_owner_said(tmp_path: Path, apart: bool | None) -> None:
    model = BERT.attached(apart=apart)
    save(model, tmp_path)
    loaded = load(tmp_path, BERT.network(), BERT.unpadded())
    assert loaded.summary() == model.summary()
    for slot, again in zip(model.slots.values(), loaded.slots.values(), strict=True):
        assert bool(again.site.apart) is bool(slot.site.apart) is (apart is not False)
        assert again.blueprints == slot.blueprints


def test_a_model_saved_before_positions_were_kept_apart_computes_as_then(tmp_path: Path) -> None:
    model = BERT.attached(apart=False)
    plant(model, BERT.slots[0], "attention")
    save(model, tmp_path)
    path = tmp_path / TOPOLOGY_FILE
    content = json.loads(path.read_text())
    content["version"] = 1
    for slot in content["slots"]:
        del slot["site"]["apart"]
    path.write_text(json.dumps(content))
    loaded = load(tmp_path, BERT.network(), BERT.unpadded()).eval()
    torch.testing.assert_close(outputs(loaded, BERT.unpadded()), outputs(model, BERT.unpadded()))
    with pytest.raises(SlotError, match="mask of padding"):
        outputs(loaded, some_padding(BERT))


def test_the_user_knows_better() -> None:
    model = attach(Ordered(), ["layer"], torch.randn(EXAMPLES, TOKENS, WIDTH), apart=True)
    assert model.slots["layer"].site.apart
    with pytest.raises(SlotError, match="'attention' does not serve .* you said that they do"):
        model.slots["layer"].germinate("attention")
