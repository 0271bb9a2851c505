"""Many ways for training to go wrong, and what a grower makes of them."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.errors import DivergedError
from esper.lifecycle.table import Stage

CLASSES = 3
EPOCHS, SPOILED = 22, 9
"""How long training goes on, and the first epoch in which something is wrong."""

MakeOptimizer = Callable[..., torch.optim.Optimizer]


SKEW = 0.95
"""By which the first coordinate is preferred where data are skewed: three in five are of the first class then."""


def data(examples: int, seed: int, skew: float = 0.0) -> tuple[Tensor, Tensor]:
    """Points whose greatest coordinate is to be found, the first one raised by ``skew``."""
    inputs = torch.randn(examples, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, :CLASSES] + skew * torch.eye(CLASSES)[0]).argmax(1)


class Training:
    """A model in training, with all that can be spoiled."""

    def __init__(
        self,
        make: MakeOptimizer | None = None,
        measure: str = "accuracy",
        controller: str = "heuristic",
        skew: float = 0.0,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        host = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.model = esper.attach(host, {"0": ["mlp"], "2": ["mlp"]}, torch.zeros(2, 6))
        groups = self.model.parameter_groups(lr=0.02)
        self.optimizer = torch.optim.AdamW(groups) if make is None else make(groups)
        self.inputs, self.labels = data(96, 0, skew)
        self.right = self.labels
        """Labels before anything went wrong."""
        self.weight = 1.0
        """Of the loss."""
        self._held_out = data(200, 1, skew)
        self._measure = measure
        self.grower = esper.Grower(
            self.model, self.optimizer, controller=controller, evaluate=self.evaluate, horizon=EPOCHS, **options
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Any:
        """Whatever growth is to be about."""
        model.eval()
        inputs, labels = self._held_out
        logits = model(inputs)
        loss = F.cross_entropy(logits, labels)
        return loss if self._measure == "loss" else (loss.item(), (logits.argmax(1) == labels).float().mean().item())

    def epoch(self) -> float:
        """The mean loss of three minibatches."""
        self.model.train()
        losses: list[Tensor] = []
        for inputs, labels in zip(self.inputs.split(32), self.labels.split(32), strict=True):
            loss = F.cross_entropy(self.model(inputs), labels)
            self.optimizer.zero_grad()
            (loss * self.weight).backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    def learn_at(self, rate: float) -> None:
        """As a schedule would say."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def scale_weights(self, factor: float) -> None:
        """Of the whole model."""
        for parameter in self.model.parameters():
            parameter.mul_(factor)


@dataclass
class Way:
    """What goes wrong: from the beginning, with the optimizer, or in each epoch from one on."""

    make: MakeOptimizer | None = None
    spoil: Callable[[Training], None] | None = None
    start: int = SPOILED
    once: bool = False


@dataclass
class Course:
    """What came of it."""

    ends: set[str] = field(default_factory=set)
    """``rollback``, ``diverged`` and ``warning``."""
    fossilized: list[float] = field(default_factory=list)
    """The validation loss at which seeds were kept after things had gone wrong."""
    decisions: list[esper.Decision] = field(default_factory=list)


def _dead(training: Training) -> None:
    with torch.no_grad():
        training.model.host[0].bias.fill_(-1e6)


def _fill(value: float) -> Callable[[Training], None]:
    def fill(training: Training) -> None:
        with torch.no_grad():
            training.model.host[2].weight[0, 0] = value

    return fill


def _data(factor: float) -> Callable[[Training], None]:
    def scale(training: Training) -> None:
        training.inputs = data(96, 0)[0] * factor

    return scale


def _weigh(factor: float) -> Callable[[Training], None]:
    return lambda training: setattr(training, "weight", factor)


def _other_labels(training: Training) -> None:
    training.labels = (training.right + 1) % CLASSES


def _rate(rate: float) -> Callable[[Training], None]:
    return lambda training: training.learn_at(rate)


def _one_input(value: float) -> Callable[[Training], None]:
    def spoil(training: Training) -> None:
        training.inputs = data(96, 0)[0]
        training.inputs[5, 1] = value

    return spoil


WAYS: dict[str, Way] = {
    "sgd at 1e3 from the start": Way(torch.optim.SGD, _rate(1e3), 1),
    "adam at 100 from the start": Way(torch.optim.Adam, _rate(100.0), 1),
    "gradients of zero from the start": Way(None, _weigh(0.0), 1),
    "a rate of zero from the start": Way(None, _rate(0.0), 1),
    "dead from the start": Way(lambda groups: torch.optim.SGD(groups, lr=0.02), _dead, 1),
    "sgd, the rate jumps": Way(lambda groups: torch.optim.SGD(groups, lr=0.1), _rate(1e3)),
    "momentum, the rate jumps": Way(lambda groups: torch.optim.SGD(groups, momentum=0.9, lr=0.05), _rate(10.0)),
    "adam, the rate jumps": Way(torch.optim.Adam, _rate(50.0)),
    "rmsprop, the rate jumps": Way(torch.optim.RMSprop, _rate(10.0)),
    "inputs of another scale": Way(None, _data(1e5)),
    "inputs that overflow": Way(None, _data(1e38)),
    "an infinity among the inputs": Way(None, _one_input(math.inf), once=True),
    "a NaN among the inputs": Way(None, _one_input(math.nan), once=True),
    "an infinite weight": Way(None, _fill(math.inf), once=True),
    "a NaN as weight": Way(None, _fill(math.nan), once=True),
    "weights that overflow": Way(None, lambda training: training.scale_weights(1e30), once=True),
    "weights grow": Way(None, lambda training: training.scale_weights(2.0)),
    "weights of zero": Way(None, lambda training: training.scale_weights(0.0)),
    "dead units": Way(None, _dead),
    "other labels": Way(None, _other_labels),
    "the loss is climbed": Way(None, _weigh(-1.0)),
    "gradients that overflow": Way(lambda groups: torch.optim.SGD(groups, lr=0.02), _weigh(1e38)),
    "weights decay too fast": Way(lambda groups: torch.optim.SGD(groups, weight_decay=2e2, lr=0.02)),
}


def course(way: Way, measure: str, **options: Any) -> Course:
    """Train that way through the call of the README, and see what is told of it."""
    found, training = Course(), Training(way.make, measure, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for epoch in range(1, EPOCHS + 1):
            if way.spoil is not None and (epoch == way.start if way.once else epoch >= way.start):
                way.spoil(training)
            try:
                loss = training.epoch()
                decision = training.grower.step(train_loss=loss)
            except DivergedError:
                found.ends.add("diverged")
                break
            found.decisions.append(decision)
            if decision.rollback is not None:
                found.ends.add("rollback")
            if epoch >= way.start:
                found.fossilized += [decision.loss for change in decision.changes if change.after is Stage.FOSSILIZED]
    if any("No module is kept until" in str(one.message) for one in told):
        found.ends.add("warning")
    return found
