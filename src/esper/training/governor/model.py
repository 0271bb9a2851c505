"""The governor of one model, in a training loop of your own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from esper.errors import DivergedError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.training.governor.settings import GovernorSettings
from esper.training.governor.vitals import Monitor, Trouble, Vitals, skill


@dataclass(frozen=True)
class Rollback:
    """What a rollback did."""

    trouble: Trouble
    """What the last check found."""
    loss: float
    """The loss of that check."""
    loss_restored: float
    """The loss with which the snapshot was taken; NaN for the one taken before any check."""
    pruned: tuple[str, ...]
    """Slots whose seeds are gone."""


@dataclass(frozen=True)
class _Snapshot:
    """Copies beside the tensors they belong to: what matters is the tensor's identity, never its name."""

    parameters: list[tuple[nn.Parameter, Tensor]]
    buffers: list[tuple[nn.Module, str, Tensor]]
    generators: list[tuple[torch.Generator, Tensor]]
    loss: float


class Governor:
    """Watches one model that any `torch.optim` optimizer trains, and restores it when training blows up.

    ```python
    governor = Governor(model, optimizer, classes=10)
    for epoch in range(100):
        loss, accuracy = train_one_epoch(model, optimizer)
        if governor.check(loss, accuracy):
            governor.rollback()
    ```

    The copies are written into the model's own tensors, so parameters keep their identity and the optimizer goes on
    owning them. Its state is cleared: momentum from before would push straight back. On a `GrowingModel` live seeds are
    pruned and leave the optimizer; so does a fossil that germinated after the snapshot.

    A check reads all parameters and, if vitals are good, copies them: do it once per epoch, or every hundred steps.

    Args:
        model: Any module.
        optimizer: The one that trains it.
        settings: Parameters of the detectors.
        classes: Number of classes, for the detection of a collapse to guessing; None: no such detection.
        generators: Sources of randomness to put back; None: torch's global ones, of the CPU and of all CUDA devices in
            use by the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: GovernorSettings | None = None,
        classes: int | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings or GovernorSettings()
        self.rollbacks = 0
        self._classes = classes
        self._generators = list(_global_generators(model) if generators is None else generators)
        self._monitor = Monitor(self.settings, networks=1)
        self._trouble, self._loss = Trouble.NONE, math.nan
        self.snapshot()

    @torch.no_grad()
    def snapshot(self) -> None:
        """Keep the present state as the one to return to. `check` does so by itself whenever vitals are good."""
        self._snapshot = _Snapshot(
            [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()],
            [(module, name, buffer.clone()) for module, name, buffer in _buffers(self.model)],
            [(generator, generator.get_state()) for generator in self._generators],
            self._loss,
        )

    def check(self, loss: float | Tensor, accuracy: float | Tensor | None = None) -> Trouble:
        """Judge the state that training has led to; `Trouble.NONE`, which is falsy, if nothing is wrong.

        Args:
            loss: Training loss since the last check, in any unit.
            accuracy: Fraction classified correctly, in [0, 1]; needed to detect a collapse.
        """
        self._loss = _number(loss)
        known = math.nan if accuracy is None or self._classes is None else _number(accuracy)
        finite = math.isfinite(self._loss) and all(bool(tensor.isfinite().all()) for tensor in self._tensors())
        vitals = Vitals(np.array([self._loss]), skill(np.array([known]), self._classes or 2), np.array([finite]))
        judgement = self._monitor.judge(vitals)
        self._trouble = Trouble(judgement.trouble[0])
        if judgement.good[0]:
            self.snapshot()
        return self._trouble

    def expect_change(self) -> None:
        """The model was changed on purpose: forget what was usual for it, it may well do worse now."""
        self._monitor.restart(np.array([True]))

    @torch.no_grad()
    def rollback(self) -> Rollback:
        """Return to the last snapshot, whatever the last check said.

        Raises:
            DivergedError: there have been `max_rollbacks` before; the model is restored all the same.
        """
        known = {parameter for parameter, _ in self._snapshot.parameters}
        pruned = self._prune(known) if isinstance(self.model, GrowingModel) else ()
        present = set(self.model.parameters())
        for parameter, saved in self._snapshot.parameters:
            if parameter in present:
                parameter.copy_(saved)
        for module, name, saved in self._snapshot.buffers:
            module.get_buffer(name).copy_(saved)
        for generator, state in self._snapshot.generators:
            generator.set_state(state)
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        self._monitor.restart(np.array([True]))
        self.rollbacks += 1
        if self.rollbacks > self.settings.max_rollbacks:
            raise DivergedError(
                f"training blew up again ({self._trouble.name}) after {self.settings.max_rollbacks} rollbacks: the "
                "model is in its last good state; lower the learning rate or check the data"
            )
        return Rollback(self._trouble, self._loss, self._snapshot.loss, pruned)

    def _prune(self, known: set[nn.Parameter]) -> tuple[str, ...]:
        """Remove live seeds, and fossils that the snapshot lacks, from the model and the optimizer."""
        assert isinstance(self.model, GrowingModel)
        doomed = [
            name
            for name, seed in self.model.seeds.items()
            if not (seed.fossilized and known.issuperset(seed.parameters()))
        ]
        gone: set[Tensor] = set()
        for name in doomed:
            gone.update(self.model.seeds[name].parameters())
            self.model.slots[name].remove()
        for group in self.optimizer.param_groups:
            group["params"][:] = [parameter for parameter in group["params"] if parameter not in gone]
        return tuple(doomed)

    def _tensors(self) -> Iterable[Tensor]:
        """All that must be finite."""
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _number(value: float | Tensor) -> float:
    return value.detach().item() if isinstance(value, Tensor) else value


def _buffers(model: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    """All buffers but the alphas of seeds, which are a matter of the lifecycle, not of training."""
    for module in model.modules():
        if isinstance(module, Seed):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def _global_generators(model: nn.Module) -> list[torch.Generator]:
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[device] for device in sorted(devices))]
