"""Evidence `refit` in a loop of one's own: seeds on trial are compared with a model that trains on without them."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import esper
from esper import Grower, GrowingModel
from esper.control.rules.schedule import Planting, Schedule
from esper.errors import CheckpointError, ConfigError
from esper.grower.counterfactual import Counterfactual
from esper.grower.fork import Fork
from esper.grower.packing import pack
from esper.grower.practice.growth import Growth
from esper.grower.practice.settings import GrowSettings
from esper.grower.refit import REFIT
from esper.grower.structure import regrow
from esper.lifecycle.actions import Op
from esper.lifecycle.gates import Reason
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.rl.conduct import Conduct
from esper.tasks.practice.registry import get_task
from esper.tasks.practice.task import Access
from grower.training_loop import CLASSES, SLOTS, WIDTH, data, validate

HELD = Rules(operations=(Op.WAIT, Op.GERMINATE))
"""What germinates is held for good."""
HORIZON = 20
DECISIONS = 9


class Batched(nn.Sequential):
    """With running statistics."""

    def __init__(self) -> None:
        first, second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        super().__init__(first, nn.BatchNorm1d(WIDTH), second, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class Dropping(nn.Sequential):
    """With random numbers."""

    def __init__(self) -> None:
        first, second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        super().__init__(first, nn.Dropout(0.3), second, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class Tied(nn.Sequential):
    """With a tensor in two places."""

    def __init__(self) -> None:
        first, second, last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        last.weight = second.weight
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), last, nn.Linear(WIDTH, CLASSES))


class Normed(nn.Sequential):
    """With parametrized weights."""

    def __init__(self) -> None:
        first, second = weight_norm(nn.Linear(4, WIDTH)), weight_norm(nn.Linear(WIDTH, WIDTH))
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class Counting(nn.Sequential):
    """With a buffer that is assigned anew."""

    def __init__(self) -> None:
        first, second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self[1](self[0](inputs))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self[4](self[3](self[2](hidden - self.mean)))


Build = Callable[[], nn.Module]
Backward = Callable[["Training", Tensor, Tensor], None]
HOSTS: list[Build] = [Batched, Dropping, Tied, Normed, Counting]


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


class Training:
    """A model, its optimizer with a schedule, and how it learns."""

    def __init__(
        self, host: Build, optimizer: Callable[[Any], torch.optim.Optimizer] = adam, how: str = "plain", seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.model = esper.attach(host(), SLOTS, torch.zeros(4, 4))
        self.optimizer = optimizer(self.model.parameter_groups())
        self.how = how
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaled")
        self.begin()

    def begin(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)

    def twin(self) -> Training:
        """The same once more, by copies."""
        other = copy.copy(self)
        other.model, other.optimizer, other.scaler = copy.deepcopy((self.model, self.optimizer, self.scaler))
        other.model.link(other.optimizer)
        other.begin()
        return other

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        mixed = torch.autocast("cpu", torch.bfloat16) if self.how == "mixed" else nullcontext()
        with mixed:
            return F.cross_entropy(self.model(inputs), labels)

    def learn(self, beside: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Two steps; ``beside`` is told of each loss and its minibatch before it is differentiated."""
        self.model.train()
        inputs, labels = data()
        for part in (slice(0, 48), slice(48, 96)):
            self.optimizer.zero_grad()
            for half in (slice(0, 24), slice(24, 48)) if self.how == "accumulated" else (slice(48),):
                x, y = inputs[part][half], labels[part][half]
                loss = self.loss(x, y)
                beside(loss, x, y)
                self.scaler.scale(loss / 2 if self.how == "accumulated" else loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def planting(*steps: int) -> Schedule:
    """One seed in every slot, after these decisions."""
    return Schedule([Planting(step, place, 0) for place, step in enumerate(steps)], HORIZON)


def grown(training: Training, controller: Any, **options: Any) -> Grower:
    options = {"rules": HELD, "evidence": "refit", "scaler": training.scaler, **options}
    if not training.scaler.is_enabled():
        options["scaler"] = None
    return Grower(
        training.model,
        training.optimizer,
        controller,
        evaluate=validate,
        horizon=HORIZON,
        loss=training.loss,
        **options,
    )


def forked(fork: Fork, model: GrowingModel) -> dict[str, Tensor]:
    """What the model is where it is the fork."""
    return fork.run(lambda: {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


class ByHand:
    """A branch of the model without the seed in slot ``0``."""

    def __init__(self, training: Training) -> None:
        self.mine, self._of = training.twin(), training
        self.mine.model.slots["0"].prune()

    def follow(self) -> None:
        """What comes and grows elsewhere, comes and grows here."""
        for name, slot in self._of.model.slots._modules.items():
            own = self.mine.model.slots._modules[name]
            if slot.seed is None or slot.name == "0":
                continue
            if own.seed is None:
                own.occupant = copy.deepcopy(slot.seed)
                own.ownership.extend(own.name, list(own.seed.parameters()))
            own.seed.alpha.copy_(slot.seed.alpha)
            own.seed.requires_grad_(next(slot.seed.parameters()).requires_grad)

    def learn(self, minibatches: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """As its owner does, of the same minibatches, with the random numbers that each came with."""
        left = iter(minibatches)
        usual = self.mine.loss

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            state, x, y = next(left)
            assert torch.equal(x, inputs)
            assert torch.equal(y, labels)
            torch.set_rng_state(state)
            return usual(inputs, labels)

        state = torch.get_rng_state()
        self.mine.loss = loss  # type: ignore[method-assign]
        self.mine.learn(lambda *_: None)
        self.mine.loss = usual  # type: ignore[method-assign]
        torch.set_rng_state(state)


def compared(training: Training, grower: Grower) -> int:
    """Train, and compare the fork with a branch by hand; at how many decisions."""
    hand, checked = None, 0
    for _ in range(DECISIONS + 3):
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def beside(loss: Tensor, x: Tensor, y: Tensor, seen: Any = seen) -> None:
            seen.append((torch.get_rng_state(), x, y))
            grower.learn_apart(loss, x, y)

        training.learn(beside)
        if hand is not None:
            hand.learn(seen)
            expected = hand.mine.tensors()
            found = forked(grower.refit.forks["0"], training.model)
            assert expected.keys() == found.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
            with_seed, without = validate(training.model), validate(hand.mine.model)
        decision = grower.step(train_loss=1.0)
        if hand is not None:
            checked += 1
            if checked >= REFIT:
                assert decision.contributions["0"] == with_seed[1] - without[1]
            else:
                assert "0" not in decision.contributions
            hand.follow()
        elif "0" in grower.refit.forks:
            hand = ByHand(training)
    return checked


@pytest.mark.parametrize("host", HOSTS)
def test_a_fork_is_a_branch_without_the_seed(host: Build) -> None:
    training = Training(host)
    assert compared(training, grown(training, planting(0, 1))) > REFIT


@pytest.mark.parametrize("how", ["accumulated", "scaled", "mixed"])
def test_a_fork_learns_however_the_loop_is_written(how: str) -> None:
    training = Training(Batched, how=how)
    assert compared(training, grown(training, planting(0, 1))) > REFIT


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: torch.optim.NAdam(groups, lr=1e-2),
        lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2), foreach=False),
    ],
)
def test_a_fork_has_the_optimizers_moments(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    training = Training(Batched, optimizer)
    assert compared(training, grown(training, planting(0, 1))) > REFIT


def test_a_seed_that_comes_later_comes_into_the_fork() -> None:
    training = Training(Batched)
    assert compared(training, grown(training, planting(0, 6))) > REFIT
    assert training.model.slots["2"].seed is not None


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("how", ["plain", "accumulated", "scaled", "mixed"])
def test_the_model_does_not_notice(host: Build, how: str) -> None:
    def run(evidence: str) -> tuple[dict[str, Tensor], list[Any]]:
        training = Training(host, how=how)
        seen: list[Any] = []
        for parameter in training.model.host.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
        grower = grown(training, planting(0, 1), evidence=evidence)
        for _ in range(DECISIONS):
            training.learn(grower.learn_apart)
            grower.step(train_loss=1.0)
        assert (len(grower.refit.forks) == 2) is (evidence == "refit")
        moments = [v for s in training.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return training.tensors(), [*seen, *moments, torch.get_rng_state()]

    (mine, all_mine), (theirs, all_theirs) = run("refit"), run("dependence")
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    torch.testing.assert_close(all_mine, all_theirs, rtol=0, atol=0)
