"""The promises that every blueprint keeps, on every layout it serves."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from esper.errors import ConfigError, SlotError, UnknownBlueprintError
from esper.growth.blueprints import registry
from esper.growth.blueprints.registry import Blueprint, for_site, get, register
from esper.growth.site import Layout, Site
from esper.population.execution import make_stacked_call
from growth.blueprint_cases import (
    SITES,
    Scaling,
    batch,
    every_case,
    generator,
    grown,
)

# --- birth ------------------------------------------------------------------------------------------------------------


@every_case
def test_initial_values_come_from_the_given_generator_alone(kind: type[Blueprint], site: Site):
    state = torch.random.get_rng_state()
    first, again, other = (kind(site, generator(seed)).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key in first if first[key].unique().numel() > 1]
    assert bool(drawn) == (kind.name not in ("norm", "input_skip"))
    assert all(not torch.equal(first[key], other[key]) for key in drawn)


# --- cost -------------------------------------------------------------------------------------------------------------


@every_case
def test_declared_parameters_are_the_real_ones(kind: type[Blueprint], site: Site):
    for width in (1, 2, 3, 8, site.width):
        narrowed = replace(site, width=width)
        real = sum(parameter.numel() for parameter in kind(narrowed, generator()).parameters())
        assert kind.cost_at(narrowed).parameters == real


@every_case
def test_declared_flops_are_those_that_torch_counts(kind: type[Blueprint], site: Site):
    """As for hosts. Torch does not see the depthwise convolution of sequences, which is computed tap by tap."""
    features, inputs = batch(site, size=1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        grown(kind, site)(features, inputs)
    taps = 3 if kind.name == "depthwise" and site.layout is Layout.SEQUENCE else 0
    assert kind.cost_at(site).flops == counter.get_total_flops() + 2 * taps * site.positions * site.width


# --- batching ---------------------------------------------------------------------------------------------------------


@every_case
def test_examples_do_not_see_each_other_and_nothing_is_remembered(kind: type[Blueprint], site: Site):
    blueprint = grown(kind, site)
    before = copy.deepcopy(blueprint.state_dict())
    features, inputs = batch(site)
    together = blueprint(features, inputs)
    single = torch.cat([blueprint(features[[i]], inputs[[i]]) for i in range(len(features))])
    torch.testing.assert_close(together, single, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(value, before[key]) for key, value in blueprint.state_dict().items())


# --- numbers and copies -----------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_lower_precision_agrees(kind: type[Blueprint], site: Site, dtype: torch.dtype, tolerance: float):
    blueprint = grown(kind, site)
    for parameter in blueprint.parameters():
        parameter.data *= 0.3
    features, inputs = batch(site)
    expected = blueprint(features, inputs)
    actual = blueprint.to(dtype)(features.to(dtype), inputs.to(dtype))
    assert actual.dtype == dtype
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@every_case
def test_silent_features_give_finite_gradients(kind: type[Blueprint], site: Site):
    features, inputs = (torch.zeros_like(value) for value in batch(site))
    blueprint = grown(kind, site)
    blueprint(features.requires_grad_(), inputs).sum().backward()
    gradients = [value.grad for value in (*blueprint.parameters(), features) if value.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


@every_case
def test_copies_are_equal_and_independent(kind: type[Blueprint], site: Site):
    features, inputs = batch(site)
    blueprint = grown(kind, site)
    expected = blueprint(features, inputs)
    for other in (copy.deepcopy(blueprint), pickle.loads(pickle.dumps(blueprint))):
        assert torch.equal(other(features, inputs), expected)
        for parameter in other.parameters():
            parameter.data.zero_()
        assert torch.equal(blueprint(features, inputs), expected)


# What each blueprint computes, by torch's own layers.


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


@pytest.mark.parametrize(
    ("name", "width", "rank"), [("lowrank", 10, 2), ("lowrank_8", 4, 4), ("lowrank_8", 8, 8), ("lowrank_8", 64, 8)]
)
def test_lowrank(name: str, width: int, rank: int):
    seed, (h, inputs) = grown(get(name), replace(TOKENS, width=width)), batch(replace(TOKENS, width=width))
    assert torch.linalg.matrix_rank(seed.up @ seed.down) == rank
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
    assert get("squeeze_excite").cost_at(wide).parameters == 2 * 8 * 32 + 8 + 32
    seed, h = grown(get("squeeze_excite"), wide), batch(wide)[0]
    hidden = F.linear(h.mean((2, 3)), seed.squeeze, seed.squeeze_bias).relu()
    openness = 2 * torch.sigmoid(F.linear(hidden, seed.excite, seed.excite_bias)) - 1
    torch.testing.assert_close(seed(h, h), h * openness[:, :, None, None])


# No blueprint needs memory out of proportion, as sites of real models are far larger than those of the suites.


LARGE_SITES = [
    Site(Layout.FEATURES, width=48, extent=(), input_shape=(40,)),
    Site(Layout.TOKENS, width=48, extent=(40,), input_shape=(40, 16)),
    Site(Layout.SEQUENCE, width=24, extent=(40,), input_shape=(2, 40)),
    Site(Layout.IMAGE, width=24, extent=(12, 14), input_shape=(3, 12, 14)),
]
WIDENED = 4
"""How many times as wide as the features a hidden layer may be."""
LARGE_CASES = [
    pytest.param(kind, site, id=f"{kind.name}-{site.layout.value}") for site in LARGE_SITES for kind in for_site(site)
]


class Largest(TorchFunctionMode):
    """While active, notes how many values the largest tensor has that any function makes."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.values = max(self.values, result.numel())
        return result


def allowed(site: Site, features: Tensor, seed: Blueprint) -> int:
    """Hidden layers, a weight for every pair of tokens of each example, and the parameters."""
    pairs = len(features) * site.positions**2 if site.layout is Layout.TOKENS else 0
    return max(WIDENED * features.numel(), pairs, *(parameter.numel() for parameter in seed.parameters()))


@pytest.mark.parametrize(("kind", "site"), LARGE_CASES)
def test_no_tensor_is_far_larger_than_the_features(kind: type[Blueprint], site: Site) -> None:
    seed, (features, inputs) = grown(kind, site), batch(site, size=6)
    with Largest() as largest:
        seed(features, inputs)
    assert features.numel() <= largest.values <= allowed(site, features, seed)


# Finding blueprints by name and by site, and registering new ones.


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout.FEATURES, "gate input_skip lowrank mlp mlp_wide norm"),
        (Layout.TOKENS, "attention gate input_skip lowrank lowrank_8 mlp mlp_wide norm token_conv token_mix"),
        (Layout.SEQUENCE, "bottleneck conv1x1 conv3x3 depthwise gate norm squeeze_excite"),
        (Layout.IMAGE, "bottleneck conv1x1 conv3x3 depthwise gate norm squeeze_excite"),
    ],
)
def test_for_site_lists_what_serves_a_layout(layout: Layout, expected: str):
    site = next(site for site in SITES if site.layout is layout)
    assert " ".join(kind.name for kind in for_site(site)) == expected


def test_an_unknown_name_raises_with_near_names():
    with pytest.raises(UnknownBlueprintError, match=r"'token_cnov'.*did you mean 'token_conv'"):
        get("token_cnov")
    with pytest.raises(UnknownBlueprintError, match=r"'zzzz'; known are attention, block_copy, block_zero, bottleneck"):
        get("zzzz")


def test_users_register_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    assert register(Scaling) is Scaling
    assert get("scaling") is Scaling
    assert Scaling in for_site(SITES[0])
    assert Scaling not in for_site(SITES[2])


def test_a_taken_name_raises_and_keeps_the_first_holder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scaling, "name", "mlp")
    with pytest.raises(ConfigError, match=r"'mlp'.*taken by esper\.growth\.blueprints\.channels\.Mlp"):
        register(Scaling)
    assert get("mlp") is not Scaling


def test_a_site_that_is_not_served_raises():
    with pytest.raises(SlotError, match=r"'token_mix' does not support .*features"):
        get("token_mix")(SITES[0], generator())


@pytest.mark.parametrize(
    ("name", "site"),
    [
        pytest.param("input_skip", Site(Layout.TOKENS, 4, (8,), (6, 5)), id="other token count"),
        pytest.param("input_skip", Site(Layout.TOKENS, 4, (8,), (8,)), id="vector input, tokens here"),
        pytest.param("input_skip", Site(Layout.FEATURES, 4, (), (8, 5)), id="token input, vector here"),
        pytest.param("input_skip", Site(Layout.FEATURES, 4, (), ()), id="scalar input"),
        pytest.param("token_conv", Site(Layout.TOKENS, 4, (1,), (1, 5)), id="no neighbours"),
        pytest.param("token_mix", Site(Layout.TOKENS, 4, (1,), (1, 5)), id="one token to mix"),
        pytest.param("attention", Site(Layout.TOKENS, 4, (1,), (1, 5)), id="one token to attend to"),
        pytest.param("conv3x3", Site(Layout.IMAGE, 4, (5, 1), (1, 5, 1)), id="image one pixel wide"),
        pytest.param("depthwise", Site(Layout.SEQUENCE, 4, (1,), (1, 4)), id="sequence of one sample"),
    ],
)
def test_sites_where_parameters_would_be_dead_are_not_served(name: str, site: Site):
    assert not get(name).supports(site)
