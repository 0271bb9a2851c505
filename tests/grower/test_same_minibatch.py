"""Forks learn from the minibatch that the loss is of, or there is an error or a warning."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.control.rules import Planting, Schedule
from esper.errors import ConfigError
from factories import HELD, RINGS, WIDTH, make_data, validate

SLOTS_OF_HOST = {"0": ["mlp"], "2": ["mlp"]}

HOSTS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.Identity()],
    "with dropout": lambda: [nn.Dropout(0.3)],
    "with running statistics": lambda: [nn.BatchNorm1d(WIDTH)],
}


class Loop:
    """A model with a fork that learns by `esper.Grower.isolated_backward`, and two minibatches."""

    def __init__(self, host: str, compute: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(4, WIDTH), *HOSTS[host](), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, RINGS)]
        self.model = esper.attach(nn.Sequential(*layers), SLOTS_OF_HOST, torch.zeros(2, 4))
        optimizer = torch.optim.SGD(self.model.parameter_groups(lr=0.1))
        self.compute = compute
        inputs, labels = make_data()
        self.minibatches = [(inputs[:12], labels[:12]), (inputs[12:20], labels[12:20])]
        self.grower = esper.Grower(
            self.model,
            optimizer,
            esper.Refit(validate),
            controller=Schedule([Planting(1, 0, 0)], 20),
            horizon=20,
            loss=self.loss,
            rules=HELD,
        )
        for _ in range(8):
            self.learn(self.minibatches[0], self.minibatches[0])
            self.grower.step(train_loss=1.0)
            if self.grower.backend.forks.forks:
                return
        raise AssertionError

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.compute(self.model, inputs, labels)

    def learn(self, given: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
        self.model.train()
        self.grower.optimizer.zero_grad()
        loss = self.loss(*given)
        self.grower.isolated_backward(loss, *other)
        loss.backward()
        self.grower.optimizer.step()


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def with_noise(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs + torch.randn_like(inputs)), labels)


@pytest.mark.parametrize("host", HOSTS)
def test_another_minibatch_than_that_of_the_loss_is_refused(host: str) -> None:
    loop = Loop(host, cross_entropy)
    with pytest.raises(ConfigError, match="the model was called with other inputs for that loss"):
        loop.learn(*loop.minibatches)


@pytest.mark.parametrize("host", HOSTS)
def test_other_examples_of_as_many_are_refused(host: str) -> None:
    loop = Loop(host, cross_entropy)
    inputs, labels = loop.minibatches[0]
    with pytest.raises(ConfigError, match="the model was called with other inputs for that loss"):
        loop.learn((inputs, labels), (inputs.roll(1, 0) * 2, labels))


def test_other_labels_are_warned_of() -> None:
    loop = Loop("plain", cross_entropy)
    inputs, labels = loop.minibatches[0]
    with pytest.warns(UserWarning, match="the grower's loss function computes"):
        loop.learn((inputs, labels), (inputs, (labels + 1) % RINGS))


@pytest.mark.parametrize("compute", [cross_entropy, with_noise])
@pytest.mark.parametrize("host", HOSTS)
def test_the_same_minibatch_is_neither_refused_nor_warned_of(
    host: str, compute: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> None:
    loop = Loop(host, compute)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for minibatch in loop.minibatches:
            loop.learn(minibatch, minibatch)


def test_another_pass_in_between_is_no_other_minibatch() -> None:
    loop = Loop("plain", cross_entropy)
    minibatch, other = loop.minibatches
    loss = loop.loss(*minibatch)
    with torch.no_grad():
        loop.model(other[0])
    loop.grower.isolated_backward(loss, *minibatch)
