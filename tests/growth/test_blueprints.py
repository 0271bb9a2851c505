"""The promises that every blueprint keeps, on every layout it serves."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.site import Layout, Site
from esper.numerics.stacking import Stackable
from growth.blueprint_cases import (
    CASES,
    batch,
    draw,
    every_case,
    generator,
    grown,
    live_channels,
    newborn,
    padded,
    shape_of,
)

# --- birth ------------------------------------------------------------------------------------------------------------


@every_case
def test_the_contribution_at_birth_is_exactly_zero(kind: type[Blueprint], site: Site):
    features, inputs = batch(site)
    contribution = newborn(kind, site)(features, inputs)
    assert contribution.shape == features.shape
    assert (contribution == 0).all()


@every_case
def test_a_gradient_reaches_a_newborn(kind: type[Blueprint], site: Site):
    features, inputs = batch(site)
    blueprint = newborn(kind, site)
    (blueprint(features, inputs) * draw(*features.shape, seed=5)).sum().backward()
    assert any(parameter.grad.abs().max() > 1e-6 for parameter in blueprint.parameters())


@every_case
def test_two_steps_move_every_parameter(kind: type[Blueprint], site: Site):
    features, inputs = batch(site, size=32)
    target = draw(*features.shape, seed=5)
    blueprint = newborn(kind, site)
    before = [parameter.detach().clone() for parameter in blueprint.parameters()]
    optimizer = torch.optim.Adam(blueprint.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(features + blueprint(features, inputs), target).backward()
        optimizer.step()
    for old, (name, new) in zip(before, blueprint.named_parameters(), strict=True):
        assert (new - old).abs().max() > 1e-3, name


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
        narrowed = site.with_width(width)
        real = sum(parameter.numel() for parameter in kind(narrowed, generator()).parameters())
        assert kind.parameters_at(narrowed) == real


@pytest.mark.parametrize("w", [2, 3, 10])
def test_parameters_in_the_token_suite(w: int):
    site = Site(Layout.TOKENS, width=w, extent=(8,), input_shape=(8, 5))
    expected = {
        "mlp": 4 * w**2 + 3 * w,
        "token_conv": 4 * w**2 + w,
        "attention": w**2 + 9 * w,
        "token_mix": w**2 + 72,
        "gate": 9 * w + 4,
        "norm": 2 * w,
        "input_skip": 6 * w,
    }
    assert {name: get(name).parameters_at(site) for name in expected} == expected


@every_case
def test_declared_flops_are_those_that_torch_counts(kind: type[Blueprint], site: Site):
    """As for hosts. Torch does not see the depthwise convolution of sequences, which is computed tap by tap."""
    features, inputs = batch(site, size=1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        grown(kind, site)(features, inputs)
    taps = 3 if kind.name == "depthwise" and site.layout is Layout.SEQUENCE else 0
    assert kind.flops_at(site) == counter.get_total_flops() + 2 * taps * site.positions * site.width


# --- padding ----------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("extra", [1, 7])
def test_a_padded_narrow_blueprint_is_the_narrow_one(kind: type[Blueprint], site: Site, extra: int):
    wide_site = site.with_width(site.width + extra)
    features, inputs = batch(site)
    output_gradient = draw(*features.shape, seed=5)

    narrow = grown(kind, site)
    narrow_features = features.clone().requires_grad_()
    expected = narrow(narrow_features, inputs)
    expected.backward(output_gradient)

    wide = newborn(kind, wide_site)
    shapes = {key: value.shape for key, value in wide.state_dict().items()}
    wide.load_state_dict({key: padded(value, shapes[key]) for key, value in narrow.state_dict().items()})
    wide_shape = (features.shape[0], *shape_of(wide_site))
    wide_features = padded(features, wide_shape).requires_grad_()
    actual = live_channels(wide(wide_features, inputs), site)
    actual.backward(output_gradient)

    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = dict(narrow.named_parameters())
    for name, parameter in wide.named_parameters():
        assert_padded(parameter.grad, gradients[name].grad)
    if kind.name != "input_skip":
        assert_padded(wide_features.grad, narrow_features.grad)


def assert_padded(wide: Tensor | None, narrow: Tensor | None) -> None:
    """``wide`` is ``narrow`` and otherwise *exactly* zero."""
    assert wide is not None
    assert narrow is not None
    inside = tuple(slice(size) for size in narrow.shape)
    torch.testing.assert_close(wide[inside], narrow, rtol=1e-12, atol=1e-12)
    outside = torch.ones(wide.shape, dtype=torch.bool)
    outside[inside] = False
    assert (wide[outside] == 0).all()


# --- batching ---------------------------------------------------------------------------------------------------------


def assert_equals_a_loop(call: Callable[..., Tensor], kind: type[Blueprint], site: Site, rows: int) -> None:
    """``call(blueprint, state, features, inputs)`` on stacked arguments against one blueprint after the other."""
    seeds = [grown(kind, site, seed=row) for row in range(rows)]
    parameters, buffers = stack_module_state(seeds)
    for size in (1, 5):
        batches = [batch(site, size, seed=row) for row in range(rows)]
        features = torch.stack([features for features, _ in batches]).requires_grad_()
        inputs = torch.stack([inputs for _, inputs in batches]).requires_grad_()
        leaves = [*parameters.values(), features, inputs]
        stacked = call(seeds[0], (parameters, buffers), features, inputs)
        output_gradient = draw(*stacked.shape, seed=5)
        gradients = torch.autograd.grad(stacked, leaves, output_gradient, allow_unused=True)
        for row, seed in enumerate(seeds):
            row_features, row_inputs = (value.detach().requires_grad_() for value in (features[row], inputs[row]))
            single = seed(row_features, row_inputs)
            row_leaves = [*seed.parameters(), row_features, row_inputs]
            expected = torch.autograd.grad(single, row_leaves, output_gradient[row], allow_unused=True)
            torch.testing.assert_close(stacked[row], single, rtol=1e-12, atol=1e-12)
            for ours, theirs in zip(gradients, expected, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours[row], theirs, rtol=1e-11, atol=1e-11)


@every_case
@pytest.mark.parametrize("rows", [1, 3])
def test_vmap_over_rows_equals_a_loop(kind: type[Blueprint], site: Site, rows: int):
    def mapped(blueprint: Blueprint, state: tuple[dict[str, Tensor], ...], features: Tensor, inputs: Tensor) -> Tensor:
        def one(state: tuple[dict[str, Tensor], ...], features: Tensor, inputs: Tensor) -> Tensor:
            return functional_call(blueprint, state, (features, inputs))

        return vmap(one)(state, features, inputs)

    assert_equals_a_loop(mapped, kind, site, rows)


@pytest.mark.parametrize(("kind", "site"), [case for case in CASES if issubclass(case.values[0], Stackable)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_stackable_blueprint_equals_a_loop_without_vmap(kind: type[Blueprint], site: Site, rows: int):
    def direct(blueprint: Blueprint, state: tuple[dict[str, Tensor], ...], features: Tensor, inputs: Tensor) -> Tensor:
        return functional_call(blueprint, state, (features, inputs))

    assert_equals_a_loop(direct, kind, site, rows)


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
