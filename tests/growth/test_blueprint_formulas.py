"""What each blueprint computes, by torch's own layers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from esper.growth.blueprints.registry import get
from esper.growth.site import Layout, Site
from esper.population.execution import make_stacked_call
from growth.blueprint_cases import SITES, batch, grown

TOKENS = SITES[2]
SEQUENCE = SITES[4]
IMAGE = SITES[6]
PARAMETERS = ("queries", "keys", "values", "bias")


@pytest.mark.parametrize("name", ["mlp", "mlp_wide"])
def test_mlp(name: str):
    seed = grown(get(name), TOKENS)
    h, inputs = batch(TOKENS)
    expected = F.linear(F.linear(h, seed.inner, seed.inner_bias).relu(), seed.outer, seed.outer_bias)
    torch.testing.assert_close(seed(h, inputs), expected)


def test_lowrank():
    seed = grown(get("lowrank"), TOKENS)
    h, inputs = batch(TOKENS)
    assert torch.linalg.matrix_rank(seed.up @ seed.down) == TOKENS.width // 4
    torch.testing.assert_close(seed(h, inputs), h @ (seed.up @ seed.down).T)


@pytest.mark.parametrize(
    "site", [site for site in SITES if site.width > 4], ids=lambda site: f"{site.layout}-{site.width}"
)
def test_norm_and_gate(site: Site):
    h, inputs = batch(site)
    channel_axis = -1 if site.layout in (Layout.FEATURES, Layout.TOKENS) else 1
    channels_last = h.movedim(channel_axis, -1)

    norm = grown(get("norm"), site)
    expected = F.rms_norm(channels_last, (site.width,), norm.gamma, eps=1e-5) + norm.beta
    torch.testing.assert_close(norm(h, inputs), expected.movedim(-1, channel_axis))

    gate = grown(get("gate"), site)
    mean = channels_last.flatten(1, -2).mean(1) if site.extent else h
    hidden = F.linear(mean, gate.squeeze, gate.squeeze_bias).relu()
    openness = 2 * torch.sigmoid(F.linear(hidden, gate.excite, gate.excite_bias)) - 1
    expected = channels_last * openness.view(len(h), *[1] * len(site.extent), site.width)
    torch.testing.assert_close(gate(h, inputs), expected.movedim(-1, channel_axis))


@pytest.mark.parametrize("site", [SITES[0], TOKENS], ids=lambda site: f"{site.layout}-{site.width}")
def test_input_skip_reads_the_input_alone(site: Site):
    seed = grown(get("input_skip"), site)
    h, inputs = batch(site)
    torch.testing.assert_close(seed(h, inputs), F.linear(inputs, seed.weight, seed.bias))


def test_token_conv():
    seed = grown(get("token_conv"), TOKENS)
    h, inputs = batch(TOKENS)
    hidden = F.conv1d(h.mT, seed.kernel.permute(0, 2, 1), seed.bias, padding=1).relu()
    torch.testing.assert_close(seed(h, inputs), F.linear(hidden.mT, seed.outer))


def test_token_mix():
    seed = grown(get("token_mix"), TOKENS)
    h, inputs = batch(TOKENS)
    hidden = F.linear(h.mT, seed.mixing, seed.bias).relu()
    torch.testing.assert_close(seed(h, inputs), F.linear(hidden.mT, seed.outer))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [2, 8, 9, 20])
def test_attention(tokens: int, causal: bool):
    """One seed alone, and many at once, by whatever is faster for so many tokens."""
    site = replace(TOKENS, extent=(tokens,), causal=causal)
    seeds = [grown(get("attention"), site, seed) for seed in range(3)]
    h, inputs = (torch.stack(parts) for parts in zip(*(batch(site, seed=seed) for seed in range(3)), strict=True))
    stacked = {name: torch.stack([seed.get_parameter(name) for seed in seeds]) for name in PARAMETERS}
    live = {"live": torch.stack([seed.live for seed in seeds])}
    together = make_stacked_call(seeds[0])(stacked, live, h, inputs)
    for seed, own, own_inputs, found in zip(seeds, h, inputs, together, strict=True):
        z = F.rms_norm(own, (site.width,), eps=1e-5)
        scores = F.linear(z, seed.queries) @ F.linear(z, seed.keys).mT
        if causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
        expected = F.linear(scores.softmax(-1) @ z, seed.values, seed.bias)
        torch.testing.assert_close(seed(own, own_inputs), expected)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("site", "conv"), [(SEQUENCE, F.conv1d), (IMAGE, F.conv2d)], ids=["sequence", "image"])
def test_convolutions(site: Site, conv):
    h, inputs = batch(site)
    ones = (1,) * len(site.extent)

    seed = grown(get("conv1x1"), site)
    hidden = conv(h, seed.inner.view(*seed.inner.shape, *ones), seed.inner_bias).relu()
    torch.testing.assert_close(
        seed(h, inputs), conv(hidden, seed.outer.view(*seed.outer.shape, *ones), seed.outer_bias)
    )

    seed = grown(get("conv3x3"), site)
    hidden = conv(h, seed.kernel.movedim(-1, 1), seed.bias, padding=1).relu()
    torch.testing.assert_close(
        seed(h, inputs), conv(hidden, seed.outer.view(*seed.outer.shape, *ones), seed.outer_bias)
    )

    seed = grown(get("depthwise"), site)
    filtered = conv(h, seed.kernel[:, None], padding=1, groups=site.width)
    pointwise = seed.pointwise.view(*seed.pointwise.shape, *ones)
    torch.testing.assert_close(seed(h, inputs), conv(filtered, pointwise, seed.bias))


@pytest.mark.parametrize("site", [IMAGE, SEQUENCE], ids=lambda site: f"{site.layout}")
def test_bottleneck(site: Site):
    seed = grown(get("bottleneck"), site)
    h, inputs = batch(site)
    dimensions = len(site.extent)
    conv = F.conv2d if dimensions == 2 else F.conv1d
    ones = [1] * dimensions
    assert seed.kernel.shape[0] == site.width // 4
    hidden = conv(h, seed.reduce.view(*seed.reduce.shape, *ones), seed.reduce_bias).relu()
    hidden = conv(hidden, seed.kernel.movedim(-1, 1), seed.bias, padding=1).relu()
    expected = conv(hidden, seed.restore.view(*seed.restore.shape, *ones), seed.restore_bias)
    torch.testing.assert_close(seed(h, inputs), expected)


def test_squeeze_excite_is_a_gate_with_more_hidden_units():
    wide = Site(Layout.IMAGE, width=32, extent=(3, 3), input_shape=(1, 3, 3))
    assert get("squeeze_excite").parameters_at(wide) == 2 * 8 * 32 + 8 + 32
    seed, h = grown(get("squeeze_excite"), wide), batch(wide)[0]
    hidden = F.linear(h.mean((2, 3)), seed.squeeze, seed.squeeze_bias).relu()
    openness = 2 * torch.sigmoid(F.linear(hidden, seed.excite, seed.excite_bias)) - 1
    torch.testing.assert_close(seed(h, h), h * openness[:, :, None, None])


def test_lowrank_8_has_the_same_rank_at_any_width():
    for width, rank in ((4, 4), (8, 8), (64, 8)):
        site = Site(Layout.TOKENS, width=width, extent=(3,), input_shape=())
        seed, h = grown(get("lowrank_8"), site), batch(site)[0]
        assert torch.linalg.matrix_rank(seed.up @ seed.down) == rank
        torch.testing.assert_close(seed(h, h), h @ (seed.up @ seed.down).T)
