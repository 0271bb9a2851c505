"""Weights that modules share: what is added to one place is not lost when something ties the places again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
import tiny_transformers
from esper.growth.model import GrowingModel

TOKENS = torch.randint(1, 23, (2, 7), generator=torch.Generator().manual_seed(0))
HOSTS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": partial(tiny_transformers.gpt2, vocab_size=23, n_positions=32),
    "llama": partial(tiny_transformers.llama, tie_word_embeddings=True),
    "qwen2": partial(tiny_transformers.qwen2, tie_word_embeddings=True),
    "mistral": partial(tiny_transformers.mistral, tie_word_embeddings=True),
    "gemma": tiny_transformers.gemma,
    "phi": partial(tiny_transformers.phi, tie_word_embeddings=True),
    "gpt_neox": partial(tiny_transformers.gpt_neox, tie_word_embeddings=True),
    "opt": tiny_transformers.opt,
    "bert": tiny_transformers.bert_language_model,
    "llava": tiny_transformers.llava,
}
"""Hosts whose head shares the weight of one embedding."""
SEVERAL = {"t5": partial(tiny_transformers.t5, vocab_size=23), "bart": tiny_transformers.bart}
"""Hosts whose head shares the weight of several embeddings."""


def name_head(host: Any) -> str:
    """The name of a host's head."""
    return next(name for name, module in host.named_modules() if module is host.get_output_embeddings())


def grown(host: nn.Module, slot: str, example: Any = TOKENS) -> GrowingModel:
    """A frozen host with a low-rank update of a weight that others share, as after training."""
    model = esper.attach(host.eval(), {slot: ["lora_4"]}, example, freeze_host=True)
    seed = model.slots[slot].germinate("lora_4", torch.Generator().manual_seed(0), alpha=1.0)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.slots[slot].fossilize()
    return model


@pytest.mark.landing
@pytest.mark.parametrize("name", HOSTS)
def test_an_update_of_a_tied_head_survives_its_librarys_round_trip(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    host: Any = HOSTS[name]()
    model = grown(host, name_head(host))
    expected: Tensor = model(TOKENS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain: Any = model.finalize()
    assert host.config.tie_word_embeddings  # the host is still tied
    assert host.get_input_embeddings().weight is host.get_output_embeddings().weight
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path).eval()
    tied_again: list[Callable[[Any], object]] = [
        lambda one: one.tie_weights(),
        lambda one: one.post_init(),
        lambda one: one.resize_token_embeddings(25),
    ]
    for one in (plain, again):
        torch.testing.assert_close(one(TOKENS).logits, expected, rtol=1e-4, atol=1e-3)
        for tie in tied_again:
            tie(one)
            torch.testing.assert_close(one(TOKENS).logits[..., : expected.shape[-1]], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.landing
@pytest.mark.parametrize("name", SEVERAL)
def test_of_a_head_that_a_configuration_cannot_untie_alone_you_are_warned(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = grown(SEVERAL[name](), "lm_head", {"input_ids": TOKENS, "decoder_input_ids": TOKENS})
    expected = model(input_ids=TOKENS, decoder_input_ids=TOKENS).logits
    with pytest.warns(UserWarning, match=r"something grew in .lm_head.weight.: nothing may tie them again"):
        plain: Any = model.finalize()
    torch.testing.assert_close(plain(input_ids=TOKENS, decoder_input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-3)
    assert plain.config.tie_word_embeddings
    with pytest.raises(KeyError, match="would lose what grew here"):
        plain.save_pretrained(tmp_path)


@pytest.mark.landing
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_does_not_touch_a_tied_weight_leaves_it_tied(name: str) -> None:
    torch.manual_seed(0)
    host: Any = HOSTS[name]()
    slot = {"llama": "model.layers.0", "bert": "bert.encoder.layer.0.output.dense"}[name]
    model = esper.attach(host.eval(), {slot: ["block_copy" if name == "llama" else "lora_4"]}, TOKENS)
    model.slots[slot].germinate(model.slots[slot].blueprints[0], alpha=1.0)
    model.slots[slot].fossilize()
    plain: Any = model.finalize()
    assert plain.config.tie_word_embeddings
    assert plain.get_input_embeddings().weight is plain.get_output_embeddings().weight


class Tied(nn.Module):
    """A language model without a configuration, whose heads share the embedding's weight."""

    def __init__(self, *, heads: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 23, bias=False) for _ in range(heads))
        for head in self.heads:
            assert isinstance(head, nn.Linear)
            head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T] -> [B, T, 23]``."""
        features = self.embedding(tokens)
        return torch.stack([head(features) for head in self.heads]).sum(0)


@pytest.mark.parametrize("heads", [1, 2])
def test_of_a_weight_that_no_configuration_ties_you_are_warned(heads: int) -> None:
    model = grown(Tied(heads=heads), "heads.0")
    with pytest.warns(UserWarning, match=r"'embedding.weight' and 'heads.0.weight'.* grew in 'heads.0.weight':"):
        plain = model.finalize()
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-3)


def test_of_a_weight_that_became_wider_in_two_ways_you_are_warned() -> None:
    """One place gets further rows, the other further columns."""
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    x = torch.randn(4, 6)
    model = esper.attach(net, {("0", "2"): ["units_4"]}, x)
    model.slots["2"].germinate("units_4", alpha=1.0)
    model.slots["2"].fossilize()
    with pytest.warns(UserWarning, match=r"'0.weight' and '2.weight' were one weight, and are apart"):
        plain = model.finalize()
    torch.testing.assert_close(plain(x), model(x))


def test_of_a_class_that_ties_whatever_its_configuration_states_you_are_warned(tmp_path: Path) -> None:
    class Stubborn(Tied):
        """Ties always."""

        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"tie_word_embeddings": True})()

        def tie_weights(self) -> None:
            """Tie the head to the embedding."""
            for head in self.heads:
                assert isinstance(head, nn.Linear)
                head.weight = self.embedding.weight

        def save_pretrained(self, folder: Path) -> None:
            """Write nothing."""

    model = grown(Stubborn(), "heads.0")
    with pytest.warns(UserWarning, match="nothing may tie them again"):
        plain: Any = model.finalize()
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-3)
    with pytest.raises(KeyError, match="would lose what grew here"):
        plain.save_pretrained(tmp_path)
