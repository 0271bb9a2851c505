"""Isolation `shadow` in a loop of one's own: whatever the loop does, isolated seeds learn and nobody else notices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper import Grower, GrowingModel
from esper.errors import ConfigError
from esper.lifecycle.rules import Isolation
from esper.lifecycle.stages import Stage
from grower.training_loop import APART, CLASSES, SLOTS, WIDTH, data, last_layer_moved, validate

EPOCHS = 6


class Noisy(nn.Sequential):
    """A host with running statistics and random numbers."""

    def __init__(self) -> None:
        first, second, last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        super().__init__(first, nn.BatchNorm1d(WIDTH), second, nn.Dropout(0.3), last)


@dataclass
class Run:
    """A model in training."""

    model: GrowingModel
    optimizer: torch.optim.Optimizer
    grower: Grower
    scaler: torch.amp.GradScaler

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs), labels)


Epoch = Callable[[Run, Tensor, Tensor], None]


def plain(run: Run, inputs: Tensor, labels: Tensor) -> None:
    run.optimizer.zero_grad()
    loss = run.loss(inputs, labels)
    run.grower.isolated_backward(loss, inputs, labels)
    loss.backward()
    run.optimizer.step()


def accumulated(run: Run, inputs: Tensor, labels: Tensor) -> None:
    run.optimizer.zero_grad()
    for half in (slice(0, 48), slice(48, 96)):
        loss = run.loss(inputs[half], labels[half])
        run.grower.isolated_backward(loss, inputs[half], labels[half])
        (loss / 2).backward()
    run.optimizer.step()


def scaled(run: Run, inputs: Tensor, labels: Tensor) -> None:
    run.optimizer.zero_grad()
    loss = run.loss(inputs, labels)
    run.grower.isolated_backward(loss, inputs, labels)
    run.scaler.scale(loss).backward()
    run.scaler.step(run.optimizer)
    run.scaler.update()


def closed(run: Run, inputs: Tensor, labels: Tensor) -> None:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(inputs, labels)
        run.grower.isolated_backward(loss, inputs, labels)
        loss.backward()
        return loss

    run.optimizer.step(closure)


def begun(
    controller: str,
    host: Callable[[], nn.Module] = Noisy,
    *,
    scales: bool = False,
    slots: Mapping[str, Sequence[str]] = SLOTS,
) -> Run:
    torch.manual_seed(0)
    model = esper.attach(host(), slots, torch.zeros(4, 4))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scales)
    grower = Grower(
        model,
        optimizer,
        controller,
        evaluate=validate,
        horizon=20,
        rules=APART,
        loss=lambda inputs, labels: F.cross_entropy(model(inputs), labels),
        scaler=scaler,
    )
    return Run(model, optimizer, grower, scaler)


def trained(controller: str, epoch: Epoch, host: Callable[[], nn.Module] = Noisy) -> Run:
    run = begun(controller, host, scales=epoch is scaled)
    for _ in range(EPOCHS):
        run.model.train()
        epoch(run, *data())
        run.grower.step(train_loss=1.0)
    return run


@pytest.mark.parametrize("epoch", [plain, accumulated, scaled, closed])
def test_isolated_seeds_learn_and_nobody_else_notices(epoch: Epoch) -> None:
    bare, grown = trained("none", epoch), trained("all_at_start", epoch)
    assert (grown.grower.network.table.stage == Stage.TRAINING).all()
    assert all(last_layer_moved(seed) for seed in grown.model.seeds.values())
    mine, theirs = grown.model.host.state_dict(), bare.model.host.state_dict()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def test_what_is_fixed_in_an_isolated_seed_stays() -> None:
    def host() -> nn.Module:
        network = Noisy()
        network[2].bias.requires_grad_(False)
        return network

    run = begun("all_at_start", host, slots={"2": ["block_copy"]})
    before = copy.deepcopy(run.model.host[2])
    for _ in range(EPOCHS):
        run.model.train()
        plain(run, *data())
        run.grower.step(train_loss=1.0)
    block = run.model.seeds["2"].blueprint.block
    assert torch.equal(block.bias, before.bias)
    assert not torch.equal(block.weight, before.weight)


@pytest.mark.parametrize("epoch", [accumulated, scaled, closed])
def test_they_learn_the_same_however_the_loop_is_written(epoch: Epoch) -> None:
    def host() -> nn.Module:  # one minibatch does like its halves
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    expected, found = trained("all_at_start", plain, host=host), trained("all_at_start", epoch, host=host)
    for mine, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    ours, others = found.grower.engine.history.training, expected.grower.engine.history.training
    assert ours.host_gradient == pytest.approx(others.host_gradient, rel=1e-3)
    assert ours.seed_gradient[0] == pytest.approx(others.seed_gradient[0], rel=1e-3)
    assert ours.health.ratio[0] == pytest.approx(others.health.ratio[0], rel=1e-3)
    assert (others.seed_gradient > 0).all()


@pytest.mark.parametrize("isolation", list(Isolation))
def test_no_seed_passes_training_without_learning(isolation: Isolation) -> None:
    """A loop that says nothing of isolation trains its seeds, or is refused; it never goes on in silence."""
    rules = APART.model_copy(update={"isolation": isolation})
    refused = []
    model = esper.attach(Noisy(), SLOTS, torch.zeros(4, 4))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1))
    try:
        grower = Grower(model, optimizer, "all_at_start", evaluate=validate, horizon=20, rules=rules)
    except ConfigError as error:
        refused.append(str(error))
    assert len(refused) == (isolation is Isolation.SHADOW)
    if refused:
        assert "loss=lambda inputs, labels: " in refused[0]
        assert "grower.isolated_backward(loss, inputs, labels)" in refused[0]
        return
    inputs, labels = data()
    for _ in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        grower.step(train_loss=1.0)
    assert all(last_layer_moved(seed) for seed in model.seeds.values())


def test_a_step_of_the_optimizer_that_leaves_an_isolated_seed_out_is_refused() -> None:
    run = begun("all_at_start")
    inputs, labels = data()

    def step(told: bool) -> None:
        run.optimizer.zero_grad()
        loss = run.loss(inputs, labels)
        if told:
            run.grower.isolated_backward(loss, inputs, labels)
        loss.backward()
        if not told:
            run.grower.isolated_backward(loss, inputs, labels)  # too late
        run.optimizer.step()

    step(told=False)  # nothing is in isolation yet
    for _ in range(3):
        run.grower.step(train_loss=1.0)
    step(told=True)
    with pytest.raises(ConfigError, match="without a gradient for the seed in slot '0'"):
        step(told=False)


@pytest.mark.parametrize("blind", [lambda *_: torch.ones(()), lambda *_: torch.ones((), requires_grad=True) * 2])
def test_a_loss_that_does_not_depend_on_the_seed_is_refused(blind: Callable[..., Tensor]) -> None:
    run = begun("all_at_start")
    run.grower.apart._loss = blind
    for _ in range(3):
        run.grower.step(train_loss=1.0)
    with pytest.raises(ConfigError, match="does not depend on the seed in slot '0': it must call the growing model"):
        run.grower.isolated_backward(run.loss(*data()), *data())


def test_what_is_only_measured_teaches_nothing() -> None:
    run = trained("all_at_start", plain)
    before = [parameter.clone() for parameter in run.model.parameters()]
    with torch.no_grad():
        run.grower.isolated_backward(run.loss(*data()), *data())
    run.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    for parameter, value in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_a_seed_that_trains_apart_is_not_computed() -> None:
    run = trained("all_at_start", plain)
    called: list[nn.Module] = []
    for seed in run.model.seeds.values():
        seed.blueprint.register_forward_hook(lambda module, *_: called.append(module))
    inputs, _ = data()
    run.model(inputs)
    assert not called
