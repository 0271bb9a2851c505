"""Language models: nothing that grows at a causal site lets a token learn of later ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.attach import attach
from esper.growth.blueprints.registry import for_site, get
from esper.growth.probe import is_causal
from esper.growth.site import Layout, Site
from growth.blueprint_cases import batch, generator, grown

TOKENS = Site(Layout.TOKENS, width=6, extent=(5,), input_shape=(5, 3))
CAUSAL = replace(TOKENS, causal=True)


@pytest.mark.parametrize("kind", for_site(CAUSAL), ids=lambda kind: kind.name)
def test_what_serves_causal_sites_does_not_look_ahead(kind):
    seed = grown(kind, CAUSAL)
    features, inputs = batch(CAUSAL)
    expected = seed(features, inputs)
    for token in range(1, 5):
        later, later_inputs = features.clone(), inputs.clone()
        later[:, token:] += 1.0
        later_inputs[:, token:] += 1.0
        torch.testing.assert_close(seed(later, later_inputs)[:, :token], expected[:, :token])


@pytest.mark.parametrize(
    "name", sorted({kind.name for kind in for_site(TOKENS)} - {kind.name for kind in for_site(CAUSAL)})
)
def test_what_looks_ahead_does_not_serve_them(name):
    """Everything else that serves tokens does look ahead: nothing is refused without reason."""
    seed = grown(get(name), TOKENS)
    features, inputs = batch(TOKENS)
    later = features.clone()
    later[:, -1] += 1.0
    assert not torch.allclose(seed(later, inputs)[:, :-1], seed(features, inputs)[:, :-1])


@pytest.mark.parametrize("length", [2, 5, 9])
@pytest.mark.parametrize(
    "name", [kind.name for kind in for_site(TOKENS) if kind.name not in ("token_mix", "input_skip")]
)
def test_sequences_of_other_lengths_than_the_probe_s(name, length):
    """One at a time or together, and whatever the length: an example's features decide alone."""
    seed = grown(get(name), TOKENS)
    features = torch.randn(3, length, 6, dtype=torch.float64, generator=generator(1))
    together = seed(features, features)
    separate = torch.cat([seed(one, one) for one in features.split(1)])
    torch.testing.assert_close(together, separate)
    site = replace(TOKENS, extent=(length,))
    born_there = grown(get(name), site)
    torch.testing.assert_close(together, born_there(features, features))


def test_a_mixture_of_a_fixed_number_of_tokens_says_so():
    seed = grown(get("token_mix"), TOKENS)
    features = torch.zeros(2, 4, 6, dtype=torch.float64)
    with pytest.raises(SlotError, match="token_mix mixes 5 tokens, not 4"):
        seed(features, features)


class Reader(nn.Module):
    """Context tokens from the first to the last, or both ways."""

    def __init__(self, *, both_ways: bool = False, pooled: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.reader = nn.GRU(6, 6, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(12 if both_ways else 6, 7)
        self.pooled = pooled

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.head(self.reader(self.embedding(inputs))[0])
        return outputs.mean(1) if self.pooled else outputs


@pytest.mark.parametrize(
    ("model", "causal"),
    [(Reader(), True), (Reader(both_ways=True), False), (Reader(pooled=True), False)],
    ids=["forward", "both ways", "pooled"],
)
def test_whether_a_model_is_causal_shows_in_its_outputs(model, causal):
    tokens = torch.randint(7, (3, 5), generator=generator())
    assert is_causal(model, tokens) is causal
    growing = attach(model, ["embedding", "head"] if not model.pooled else ["head"], tokens)
    assert all(slot.site.causal is (causal and slot.site.layout is Layout.TOKENS) for slot in growing.slots.values())


@pytest.mark.parametrize("token", [0, 3])
def test_an_example_of_one_token_over_and_over_shows_it_too(token):
    tokens = torch.full((3, 5), token)
    assert is_causal(Reader(), tokens)
    assert not is_causal(Reader(both_ways=True), tokens)


def test_a_last_layer_of_zeros_hides_nothing_that_growth_could_spoil():
    model = Reader()
    nn.init.zeros_(model.head.weight)
    assert is_causal(model, torch.randint(7, (3, 5), generator=generator()))


def test_the_user_knows_better():
    tokens = torch.randint(7, (3, 5), generator=generator())
    assert attach(Reader(both_ways=True), ["head"], tokens, causal=True).slots["head"].site.causal
    assert not attach(Reader(), ["head"], tokens, causal=False).slots["head"].site.causal


class SelfAttention(nn.Module):
    """Gets the same tokens as queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, query, key, value):
        return self.head(self.attention(query, key, value, need_weights=False)[0])


def test_a_tensor_that_is_given_twice_is_changed_everywhere():
    tokens = torch.randn(2, 5, 4, generator=generator())
    assert not attach(SelfAttention(), ["head"], (tokens, tokens, tokens)).slots["head"].site.causal
