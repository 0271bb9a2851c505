"""The governor of one model, in a training loop of your own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from esper.engine.governor import GovernorSettings, Monitor, Trouble, Vitals, skill
from esper.errors import CheckpointError, DivergedError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.sharding import holds_in_all_processes, is_sharded, local_part, reshard
from esper.growth.side_pass import global_generators
from esper.serialization.state_files import from_plain, to_plain

SKILLS = 2
"""Measures of how well a network does; each is watched like a network of its own."""


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


class GovernorVerdict(NamedTuple):
    """What a governor thinks of the present state."""

    trouble: Trouble
    usual: bool
    """Whether there is neither trouble nor what becomes trouble if it lasts."""
    good: bool
    """Whether the state is worth a snapshot."""
    loss: float
    """What it was told."""


@dataclass(frozen=True)
class _Snapshot:
    """Copies beside the tensors they belong to: what matters is the tensor's identity, never its name."""

    parameters: list[tuple[nn.Parameter, Tensor]]
    buffers: list[tuple[nn.Module, str, Tensor]]
    generators: list[tuple[torch.Generator, Tensor]]
    loss: float
    memory: dict[str, Any]
    """The monitor's: what was usual then."""


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
    Where processes share parameters (FSDP2), each copies its own part; all of them check, and hear the same figures.

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
        self._generators = list(global_generators(model) if generators is None else generators)
        self._monitor = Monitor(self.settings, networks=SKILLS)
        self._trouble, self._loss = Trouble.NONE, math.nan
        self.snapshot()

    @torch.no_grad()
    def snapshot(self) -> None:
        """Keep the present state as the one to return to. `check` does so by itself whenever vitals are good."""
        reshard(self.model)
        self._snapshot = _Snapshot(
            [(parameter, local_part(parameter).detach().clone()) for parameter in self.model.parameters()],
            [(module, name, buffer.clone()) for module, name, buffer in _buffers(self.model)],
            [(generator, generator.get_state()) for generator in self._generators],
            self._loss,
            self._monitor.state_dict(),
        )

    def check(self, loss: float | Tensor, accuracy: float | Tensor | None = None) -> Trouble:
        """Judge the state that training has led to; `Trouble.NONE`, which is falsy, if nothing is wrong.

        Args:
            loss: Training loss since the last check, in any unit.
            accuracy: Fraction classified correctly, in [0, 1]; needed to detect a collapse.
        """
        accuracy_value = math.nan if accuracy is None or self._classes is None else _to_float(accuracy)
        by_accuracy = float(skill(np.array(accuracy_value), self._classes or 2))
        return self.accept(self.judge(_to_float(loss), (by_accuracy, math.nan), self.finite()))

    def finite(self, *, gradients: bool = True) -> bool:
        """Whether all parameters and the optimizer's moments are, and the ``gradients`` too."""
        reshard(self.model)
        here = all(bool(local_part(tensor).isfinite().all()) for tensor in self._tensors(gradients))
        return holds_in_all_processes(here) if any(map(is_sharded, self.model.parameters())) else here

    def judge(self, loss: float, skills: Sequence[float], finite: bool, *, hopeless: bool = False) -> GovernorVerdict:
        """The first half of `check`: look, and do nothing about it.

        Args:
            loss: Of training.
            skills: By one measure and by another (`SKILLS` in all), 0 for guessing and 1 for perfection, NaN where
                unknown: a network that guesses by any of them, and did better by it before, has collapsed.
            finite: Whether everything is that should be, but for ``loss``.
            hopeless: Whether the loss is unusual whatever it was before.
        """
        everywhere = np.ones(SKILLS)
        vitals = Vitals(everywhere * loss, np.array(skills), everywhere * (finite and math.isfinite(loss)) > 0)
        judgement = self._monitor.judge(vitals, np.full(SKILLS, hopeless))
        troubles = judgement.trouble[judgement.trouble != Trouble.NONE]
        trouble = Trouble(troubles[0]) if len(troubles) else Trouble.NONE
        return GovernorVerdict(trouble, bool(judgement.usual.all()), bool(judgement.good.all()), loss)

    def accept(self, verdict: GovernorVerdict) -> Trouble:
        """The second half of `check`, which may follow a verdict of the same model's governor in another process."""
        self._trouble, self._loss = verdict.trouble, verdict.loss
        if verdict.good:
            self.snapshot()
        return self._trouble

    @property
    def rollbacks_used(self) -> float:
        """The share of the allowed rollbacks that there have been, in [0, 1]."""
        return min(self.rollbacks / max(self.settings.max_rollbacks, 1), 1.0)

    def expect_change(self) -> None:
        """The model was changed on purpose: forget what was usual for it, it may well do worse now, if not guess."""
        self._monitor.forget_usual(np.ones(SKILLS, np.bool_))

    def forget(self) -> None:
        """What helped the model was taken from it on purpose: forget how well it did, too."""
        self._monitor.restart(np.ones(SKILLS, np.bool_))

    @torch.no_grad()
    def rollback(self) -> Rollback:
        """Return to the last snapshot, whatever the last check said.

        Raises:
            DivergedError: there have been `max_rollbacks` before; the model is restored all the same.
        """
        reshard(self.model)
        parameters = {parameter for parameter, _ in self._snapshot.parameters}
        pruned = self._prune(parameters) if isinstance(self.model, GrowingModel) else ()
        present = set(self.model.parameters())
        for parameter, saved in self._snapshot.parameters:
            if parameter in present:
                local_part(parameter).copy_(saved)
        for module, name, saved in self._snapshot.buffers:
            module.get_buffer(name).copy_(saved)
        if isinstance(self.model, GrowingModel):
            self.model.copies.reset_mirrors(self.model)
        for generator, state in self._snapshot.generators:
            generator.set_state(state)
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        self._monitor.load_state_dict(self._snapshot.memory)
        if pruned:
            self.expect_change()
        self.rollbacks += 1
        if self.rollbacks > self.settings.max_rollbacks:
            raise DivergedError(
                f"training blew up again ({self._trouble.name}) after {self.settings.max_rollbacks} rollbacks: the "
                "model is in its last good state; lower the learning rate or check the data"
            )
        return Rollback(self._trouble, self._loss, self._snapshot.loss, pruned)

    def state_dict(self) -> dict[str, Any]:
        """What the governor remembers, with the snapshot, as plain values: as large as the model, or as this process's
        part of it.
        """
        reshard(self.model)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        places = {(module, name): path for path, module, name in _buffer_places(self.model)}
        snapshot = self._snapshot
        return to_plain(
            {
                "rollbacks": self.rollbacks,
                "monitor": self._monitor,
                # Tensors that have left the model since would not be restored anyway.
                "parameters": {names[owner]: saved for owner, saved in snapshot.parameters if owner in names},
                "buffers": {
                    places[module, name]: saved for module, name, saved in snapshot.buffers if (module, name) in places
                },
                "generators": [state for _, state in snapshot.generators],
                "loss": snapshot.loss,
                "memory": snapshot.memory,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `state_dict` gave; the model has the structure that it had then.

        Raises:
            CheckpointError: it is of another model or another number of generators.
        """
        reshard(self.model)
        parameters = dict(self.model.named_parameters())
        buffers = {path: (module, name) for path, module, name in _buffer_places(self.model)}
        tensors = {**parameters, **{path: module.get_buffer(name) for path, (module, name) in buffers.items()}}
        strange = [name for name in (*state["parameters"], *state["buffers"]) if name not in tensors]
        if strange:
            raise CheckpointError(f"the governor's snapshot holds {strange[0]!r}, which this model lacks")
        like = {
            "rollbacks": self.rollbacks,
            "monitor": self._monitor,
            "parameters": {name: local_part(tensors[name]) for name in state["parameters"]},
            "buffers": {name: tensors[name] for name in state["buffers"]},
            "generators": [generator.get_state() for generator in self._generators],
            "loss": self._loss,
            "memory": self._snapshot.memory,
        }
        saved = from_plain(like, state, "the governor's state")
        self.rollbacks = saved["rollbacks"]
        self._snapshot = _Snapshot(
            [(parameters[name], value) for name, value in saved["parameters"].items()],
            [(*buffers[path], value) for path, value in saved["buffers"].items()],
            list(zip(self._generators, saved["generators"], strict=True)),
            saved["loss"],
            saved["memory"],
        )

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

    def _tensors(self, gradients: bool) -> Iterable[Tensor]:
        """All that must be finite."""
        for parameter in self.model.parameters():
            yield parameter
            if gradients and parameter.grad is not None:
                yield parameter.grad
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _to_float(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _buffers(model: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    """All buffers but the alphas of seeds, which are a matter of the lifecycle, not of training."""
    for module in model.modules():
        if isinstance(module, Seed):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def _buffer_places(model: nn.Module) -> Iterable[tuple[str, nn.Module, str]]:
    """The buffers of `_buffers` by their names in the model: name, owner, and name there."""
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    paths = {module: path for path, module in named}
    for module, name, _ in _buffers(model):
        yield f"{paths[module]}.{name}".removeprefix("."), module, name
