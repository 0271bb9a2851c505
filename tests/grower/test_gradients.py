"""What a grower sees of gradients is what backward passes left, whatever a loop does to them before it steps."""

from collections.abc import Callable, Iterator
from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, get_total_norm

import esper
from esper.grower.gradients import GradientRecorder
from factories import SLOTS, WIDTH, make_data, make_host
from population.gradient_reference import GradientReference, health_at

CLIPPED = 1e-3


class Quantised(nn.Module):
    """Some of its parameters are no numbers that could learn."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(-8, 8, dtype=torch.int8).view(4, 4), requires_grad=False)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs @ (self.codes.float() / 8))


def test_a_quantised_host_grows() -> None:
    inputs, labels = make_data()
    model = esper.attach(Quantised(), {"head": ["lora"]}, inputs[:2], freeze_host=True)
    optimizer = torch.optim.Adam(model.parameter_groups(lr=0.1))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    grower = esper.Grower(model, optimizer, controller="all_at_start", evaluate=evaluate, horizon=12)
    before = float(evaluate(model))
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        grower.step(train_loss=loss.detach())
    assert model.seeds
    assert float(evaluate(model)) < before


class Branching(nn.Sequential):
    """Of its two ends a forward pass uses one, and it can begin late."""

    def __init__(self) -> None:
        super().__init__(*make_host())
        self.other = nn.Linear(WIDTH, 3)
        self.elsewhere = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in list(self)[:4]:
            hidden = layer(hidden)
        return self.other(hidden) if self.elsewhere else self[4](hidden)


class Loop:
    """A model with two seeds, whose gradients are clipped, and what they were before."""

    def __init__(self) -> None:
        self.model = esper.attach(Branching(), SLOTS, torch.zeros(2, 4))
        self.seeds = [slot.germinate("mlp", alpha=0.5) for slot in self.model.slots.values()]
        self.optimizer = torch.optim.SGD(self.model.parameter_groups(lr=0.1))
        self.gradients = GradientRecorder(self.model, self.optimizer, None)
        self.gradients.watch(self.seeds)
        self.expected: list[Tensor] = []

    def step(self, passes: int = 1) -> None:
        inputs, labels = make_data()
        self.optimizer.zero_grad()
        for part in range(passes):
            F.cross_entropy(self.model(inputs[part::passes]), labels[part::passes]).backward()
        parts = [self.model.host, *self.seeds]
        self.expected.append(torch.stack([get_total_norm(list(gradients(part))) for part in parts]))
        assert clip_grad_norm_(self.model.parameters(), CLIPPED) > CLIPPED
        self.optimizer.step()


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


def gradients(part: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in part.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("stops", [False, True])
def test_norms_are_those_before_clipping_with_parameters_in_use_or_not(passes: int, stops: bool) -> None:
    """Also where some parameters stop to learn."""
    loop = Loop()
    for number in range(6):
        if stops and number == 3:
            loop.model.host[0].requires_grad_(False)
            loop.model.slots["0"].seed.requires_grad_(False)
        loop.model.host.elsewhere = number % 2 == 1
        loop.step(passes)
    torch.testing.assert_close(torch.stack(loop.gradients._norms), torch.stack(loop.expected))


def test_sparse_gradients_are_seen() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    model = esper.attach(nn.Sequential(table, nn.Linear(4, 3)), {"1": ["mlp"]}, torch.tensor([[0, 1], [2, 3]]))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1))
    seen = GradientRecorder(model, optimizer, None)
    model(torch.tensor([[1, 1], [2, 1]])).square().sum().backward()
    expected = torch.cat([gradient.to_dense().flatten() for gradient in gradients(model)]).norm()
    optimizer.step()
    torch.testing.assert_close(seen._norms[0], torch.stack([expected, torch.zeros(())]))


def test_what_other_hooks_do_to_gradients_afterwards_is_not_seen() -> None:
    loop = Loop()
    loop.gradients = GradientRecorder(loop.model, loop.optimizer, None)
    loop.gradients.watch(loop.seeds)
    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    for _ in range(3):
        loop.step()
    torch.testing.assert_close(torch.stack(loop.gradients._norms), 2 * torch.stack(loop.expected))


def freeze_part(loop: Loop) -> None:
    """Some of the host, and of a seed, does not learn."""
    loop.model.host[0].requires_grad_(False)
    next(loop.seeds[0].parameters()).requires_grad_(False)


def freeze_host(loop: Loop) -> None:
    loop.model.host.requires_grad_(False)


def fossilize(loop: Loop) -> None:
    loop.model.slots["0"].fossilize()


@pytest.mark.parametrize("change", [None, freeze_part, freeze_host, fossilize])
def test_health_is_what_the_gradients_of_separate_modules_give(change: Callable[[Loop], None] | None) -> None:
    """Also where parameters get no gradient, as those of the end of the host that is not in use."""
    loop = Loop()
    if change is not None:
        change(loop)
    inputs, labels = make_data()
    learning = dict(enumerate(loop.seeds))
    fossils = [seed for seed in loop.seeds if seed.fossilized]
    for decision in range(3):
        reference = GradientReference([loop.model.host, *fossils], learning)
        for part in range(decision + 1):
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.model(inputs[part::3]), labels[part::3]).backward()
            reference.observe()
            clip_grad_norm_(loop.model.parameters(), CLIPPED)
            loop.optimizer.step()
        health = loop.gradients.report()[2]
        for place, expected in reference.report().items():
            assert expected.minibatches == decision + 1
            np.testing.assert_allclose(astuple(health_at(health, 0, place)), astuple(expected), rtol=1e-5)
        assert np.isnan(health.ratio).all() == (change is freeze_host), "there is nothing to compare with"
        loop.gradients.clear()
