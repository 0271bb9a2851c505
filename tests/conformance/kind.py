"""A kind of model as users have them: a network, where it may grow, minibatches, and what it is to learn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.growth.hooks import find_tensors
from esper.growth.inputs import Arguments, call_host
from esper.growth.model import GrowingModel

EXAMPLES = 6
CLASSES = 4
WIDTH = 8
TOKENS = 6


class Minibatch(NamedTuple):
    """What the network is called with, and what is wanted of it."""

    inputs: Arguments
    target: Any = None


Loss = Callable[[Any, Any], Tensor]
"""Of the network's outputs and the target."""
Accuracy = Callable[[Any, Any], float]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


def right(logits: Tensor, target: Tensor) -> float:
    return float((logits.argmax(-1) == target).float().mean())


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of user model."""

    name: str
    network: Callable[[], nn.Module]
    slots: Mapping[str, Sequence[str]]
    """Submodules, each with blueprints that fit."""
    minibatch: Callable[[torch.Generator], Minibatch]
    loss: Loss = cross_entropy
    accuracy: Accuracy | None = right
    """None: there is but a loss."""
    accumulate: int = 1
    """Minibatches per step of the optimizer."""
    autocast: bool = False
    """Whether the loop computes in bfloat16 where torch thinks it may."""
    padded: Callable[[Minibatch, int], Minibatch] | None = None
    """The same examples, with so many more positions of padding."""
    frozen: bool = False
    """Whether only what grows learns."""
    onnx: bool = False
    """Whether exports include onnx, which takes long."""

    def fresh(self) -> nn.Module:
        """The network, always with the same values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.network()

    def attached(self, host: nn.Module | None = None) -> GrowingModel:
        host, inputs = self.fresh() if host is None else host, self.minibatches(1)[0].inputs
        return esper.attach(host, self.slots, inputs, freeze_host=self.frozen)

    def minibatches(self, number: int, seed: int = 0) -> list[Minibatch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.minibatch(generator) for _ in range(number)]

    def loss_of(self, model: nn.Module, minibatch: Minibatch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.loss(call_host(model, minibatch.inputs), minibatch.target)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 2, seed: int = 0) -> float:
        """A user's loop over so many minibatches; the mean loss."""
        model.train()
        total = 0.0
        for place, minibatch in enumerate(self.minibatches(number, seed)):
            loss = self.loss_of(model, minibatch)
            (loss / self.accumulate).backward()
            if (place + 1) % self.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / number
        return total

    def validation(self) -> Callable[[nn.Module], Any]:
        """What the user gives as ``evaluate``."""
        minibatches = self.minibatches(2, seed=1000)

        @torch.no_grad()
        def evaluate(model: nn.Module) -> Any:
            model.eval()
            losses = [float(self.loss_of(model, one)) for one in minibatches]
            loss = sum(losses) / len(losses)
            if self.accuracy is None:
                return loss
            right = [self.accuracy(call_host(model, one.inputs), one.target) for one in minibatches]
            return loss, sum(right) / len(right)

        return evaluate


def tensors(returned: Any) -> list[Tensor]:
    """All that is floating in what a network returns, whatever holds it."""
    return [one for one in find_tensors(returned) if one.is_floating_point()]


def classified(*shape: int) -> Callable[[torch.Generator], Minibatch]:
    """Noise, and classes that show in it."""

    def minibatch(generator: torch.Generator) -> Minibatch:
        inputs = torch.randn(EXAMPLES, *shape, generator=generator)
        return Minibatch(inputs, inputs.flatten(1)[:, :CLASSES].argmax(1))

    return minibatch


def mapped(*shape: int, wanted: Callable[[Tensor], Any]) -> Callable[[torch.Generator], Minibatch]:
    """Noise, and what is ``wanted`` of it."""

    def minibatch(generator: torch.Generator) -> Minibatch:
        inputs = torch.randn(EXAMPLES, *shape, generator=generator)
        return Minibatch(inputs, wanted(inputs))

    return minibatch


def text(generator: torch.Generator, vocabulary: int = CLASSES, length: int = TOKENS) -> Tensor:
    """Progressions modulo the vocabulary."""
    start = torch.randint(vocabulary, (EXAMPLES, 1), generator=generator)
    return (start + torch.arange(length)) % vocabulary
