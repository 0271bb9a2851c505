"""Every blend of every blueprint, on every layout: its formula, its birth, its stacks and its costs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from esper.growth.blueprints.registry import Blueprint
from esper.growth.site import CHANNELS_LAST, Site
from esper.growth.slot import Seed, blend_blueprint, count_blend_parameters
from esper.lifecycle.actions import Blend
from esper.population.execution import make_stacked_call
from esper.population.parameters import ParameterLayout
from growth.blueprint_cases import CASES, batch, draw, every_case, grown, newborn, padded

every_blend = pytest.mark.parametrize("blend", Blend)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
COUNT = 3


def trained(kind: type[Blueprint], site: Site, blend: Blend, number: int = 0) -> Seed:
    """As after much training."""
    seed = Seed(grown(kind, site, number), site, blend).double()
    if seed.gate is not None:
        for index, parameter in enumerate(seed.gate.parameters()):
            parameter.data = draw(*parameter.shape, seed=2000 + 10 * number + index)
    return seed


def held(seed: Seed) -> torch.nn.Module:
    """What a population has of it."""
    return seed.blueprint if seed.blend is Blend.ADD else seed


def by_formula(seed: Seed, site: Site, features: Tensor, inputs: Tensor) -> Tensor:
    """With the channels last."""
    axis = -1 if site.layout in CHANNELS_LAST else 1
    h, s = features.movedim(axis, -1), seed.blueprint(features, inputs).movedim(axis, -1)
    match seed.blend:
        case Blend.ADD:
            computed = h + seed.alpha * s
        case Blend.GATE:
            goal, openness = h + s, torch.sigmoid(seed.gate.weight.flatten() * h + seed.gate.bias.flatten())
            computed = torch.lerp(h, goal, seed.alpha * openness)
        case Blend.MULTIPLY:
            computed = h * (1 + seed.alpha * torch.tanh(s))
    return computed.movedim(-1, axis)


@every_blend
@every_case
def test_features_are_joined_by_the_formula(kind: type[Blueprint], site: Site, blend: Blend) -> None:
    features, inputs = batch(site)
    seed = trained(kind, site, blend)
    seed.alpha.fill_(0.7)
    torch.testing.assert_close(seed(features, inputs), by_formula(seed, site, features, inputs), **TOLERANCE)


@every_blend
@every_case
def test_a_newborn_changes_nothing_and_within_two_steps_all_of_it_moves(
    kind: type[Blueprint], site: Site, blend: Blend
) -> None:
    features, inputs = batch(site, size=32)
    target = draw(*features.shape, seed=5)
    seed = Seed(newborn(kind, site), site, blend).double()
    seed.alpha.fill_(1.0)
    assert torch.equal(seed(features, inputs), features)
    before = {name: parameter.detach().clone() for name, parameter in seed.named_parameters()}
    optimizer = torch.optim.Adam(seed.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(seed(features, inputs), target).backward()
        optimizer.step()
    for name, parameter in seed.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    seed.alpha.zero_()
    assert torch.equal(seed(features, inputs), features)


@every_blend
@every_case
def test_stacks_and_padded_seeds_are_computed_as_one_by_one(kind: type[Blueprint], site: Site, blend: Blend) -> None:
    """The second seed is narrower than the others: its parameters and features are padded with zeros."""
    widest = replace(site, width=site.width + 1)
    sites = [widest, site, widest]
    seeds = [trained(kind, one, blend, number) for number, one in enumerate(sites)]
    template = blend_blueprint(newborn(kind, widest), widest, blend).double()
    shape = ParameterLayout.from_module(template)
    values = torch.stack([shape.flatten_module(held(seed)) for seed in seeds]).requires_grad_()
    buffers = {
        name: torch.stack([padded(held(seed).get_buffer(name), buffer.shape) for seed in seeds])
        for name, buffer in template.named_buffers()
    }
    drawn = [batch(one, seed=10 * number) for number, one in enumerate(sites)]
    wide = torch.stack([padded(x, (len(x), *widest.shape)) for x, _ in drawn]).requires_grad_()
    computed = make_stacked_call(template)(shape.unflatten(values), buffers, wide, torch.stack([x for _, x in drawn]))
    directions = [draw(*features.shape, seed=7 + number) for number, (features, _) in enumerate(drawn)]
    live = [tuple(slice(size) for size in direction.shape) for direction in directions]
    objective = sum((one[part] * way).sum() for one, part, way in zip(computed, live, directions, strict=True))
    gradients, of_features = torch.autograd.grad(objective, (values, wide), materialize_grads=True)
    for number, (seed, (features, inputs), way) in enumerate(zip(seeds, drawn, directions, strict=True)):
        expected = seed.change(features.requires_grad_(), inputs)
        torch.testing.assert_close(computed[number][live[number]], expected, **TOLERANCE)
        parameters = dict(held(seed).named_parameters())
        own, *others = torch.autograd.grad(
            (expected * way).sum(), (features, *parameters.values()), materialize_grads=True
        )
        assert_padded(of_features[number], own)
        for name, gradient in zip(parameters, others, strict=True):
            assert_padded(shape.unflatten(gradients)[name][number], gradient)


def assert_padded(wide: Tensor, narrow: Tensor) -> None:
    """``wide`` is ``narrow`` and otherwise exactly zero."""
    torch.testing.assert_close(wide, padded(narrow, wide.shape), **TOLERANCE)
    assert not wide[padded(torch.ones_like(narrow), wide.shape) == 0].any()


@every_blend
@every_case
def test_a_blend_costs_its_parameters_and_no_flops(kind: type[Blueprint], site: Site, blend: Blend) -> None:
    """Its work is elementwise, which is free in hosts, too."""
    seed = Seed(newborn(kind, site), site, blend).double()
    counted = kind.cost_at(site).parameters + count_blend_parameters(blend, site)
    assert sum(parameter.numel() for parameter in seed.parameters()) == counted
    features, inputs = batch(site)
    with FlopCounterMode(display=False) as without:
        seed.blueprint(features, inputs)
    with FlopCounterMode(display=False) as whole:
        seed.change(features, inputs)
    assert whole.get_total_flops() == without.get_total_flops()
    assert seed.flops_at(site) == kind.cost_at(site).flops


def test_blends_are_tried_with_all_blueprints() -> None:
    assert len(CASES) > 30
