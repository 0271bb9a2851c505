"""Hosts and blueprints that compute a whole stack at once do what a vmap over them does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.lifecycle.actions import Blend
from esper.stacking import Stackable
from esper.tasks.registry import get_suite
from esper.training.evaluation import evaluate
from esper.training.execution import stacked_call
from esper.training.learning import train
from esper.training.parameters import ParameterLayout, SeedKind
from esper.training.population import Population
from open_rules import open_rules
from training.scenes import VALIDATION, Draws, instances, networks, plan


class Unstackable(nn.Module):
    """A host of which only its calls for one network are known to be right."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host

    def forward(self, inputs: Tensor) -> Tensor:
        return self.host(inputs)


def hosts_of(name: str, count: int) -> tuple[nn.Module, list[nn.Module], Tensor]:
    suite = get_suite(name)
    chosen = suite.sample(count, "train", np.random.default_rng(3))
    inputs = torch.randn(count, 6, *suite.input_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    template = suite.template().double()
    return template, [suite.host(one).double() for one in chosen], inputs


@pytest.mark.parametrize("name", ["tokens", "digits", "mnist1d_conv"])
def test_stackable_hosts_equal_vmap_and_their_loop(name: str) -> None:
    template, hosts, inputs = hosts_of(name, 5)
    assert isinstance(template, Stackable)
    shape = ParameterLayout.of(template)
    values = torch.stack([shape.row(host) for host in hosts]).requires_grad_()
    buffers = {key: torch.stack([host.get_buffer(key) for host in hosts]) for key, _ in template.named_buffers()}
    direct = stacked_call(template)(shape.unflatten(values), buffers, inputs)
    under = {f"host.{key}": tensor for key, tensor in shape.unflatten(values).items()}
    held = {f"host.{key}": tensor for key, tensor in buffers.items()}
    mapped = stacked_call(Unstackable(template))(under, held, inputs)
    alone = torch.stack([host(own) for host, own in zip(hosts, inputs, strict=True)])
    torch.testing.assert_close(direct, mapped, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(direct, alone, rtol=1e-12, atol=1e-12)
    weights = torch.randn(direct.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((output * weights).sum(), values)[0] for output in (direct, mapped)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_population_of_unstackable_hosts_learns_alike() -> None:
    chosen = instances(8)
    shared = plan(open_rules(blends=tuple(Blend)))
    slots = tuple(f"host.{slot}" for slot in shared.slots)
    wrapped = [network._replace(host=Unstackable(network.host)) for network in networks(chosen)]
    mapped = Population(replace(shared, template=Unstackable(shared.template), slots=slots), wrapped)
    assert_alike(Population(shared, networks(chosen)), mapped, Draws(chosen))


def assert_alike(first: Population, second: Population, draws: Draws) -> None:
    grown: set[SeedKind] = set()
    for _ in range(6):
        actions = draws.actions(first.legal_actions())
        batches, held_back = [draws.batch() for _ in range(3)], draws.batch(VALIDATION)
        for population in (first, second):
            population.decide(actions)
            train(population, batches)
        ours, theirs = (evaluate(population, held_back) for population in (first, second))
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-9)
        torch.testing.assert_close(first.flat.values, second.flat.values, rtol=1e-9, atol=1e-9)
        grown |= first.banks.keys()
    assert len(grown) > 3, "the test means to grow seeds"
    assert {kind.blend for kind in grown} == {*Blend}
