"""Snapshots of one model that any optimizer trains, and its rollbacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from esper.engine.governor import Governor, Intervention, Trouble
from esper.errors import CheckpointError, DivergedError
from esper.growth.followers import unwrap_optimizer
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.numerics.module_state import global_generators
from esper.serialization.state_files import from_plain, to_plain

_REASONS = {
    Trouble.NONE: "no trouble",
    Trouble.NOT_FINITE: "a training or validation loss, gradient or parameter is infinite or not a number",
    Trouble.COLLAPSED: "the model only guesses, and did better before",
    Trouble.EXPLODED: "the loss has been far above the usual",
}


@dataclass(frozen=True)
class Rollback:
    """A rollback of one model."""

    trouble: Trouble
    """The kind of trouble that the check detected."""
    loss: float
    """The training loss of that check."""
    loss_restored: float
    """The training loss when the snapshot was taken; NaN for the one taken before any check."""
    pruned: tuple[str, ...]
    """Slots that lost their module."""


class _Copies(NamedTuple):
    """Copies with the tensors that they belong to, by identity, not by name."""

    parameters: list[tuple[nn.Parameter, Tensor]]
    buffers: list[tuple[nn.Module, str, Tensor]]
    generators: list[tuple[torch.Generator, Tensor]]


class ModelSnapshot:
    """A copy of a model's parameters and buffers and of torch's global random generators, to return to.

    The copies are written into the model's own tensors, so parameters keep their identity and the optimizer goes on
    owning them. Its state is cleared: momentum from before would push straight back. On a `GrowingModel` live modules
    are pruned and leave the optimizer; so does a fossil that germinated after the snapshot.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, unwrap_optimizer(optimizer)
        self._generators = list(global_generators(model))
        self._names = {each: f"{place} on {each.device}" for place, each in enumerate(self._generators)}
        self._copies = _Copies([], [], [])

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state of the model."""
        self._copies = _Copies(
            [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()],
            [(module, name, module.get_buffer(name).clone()) for _, module, name in _list_buffers(self.model)],
            [(generator, generator.get_state()) for generator in self._generators],
        )

    @torch.no_grad()
    def restore(self) -> tuple[str, ...]:
        """Return to the state of `take`; returns the slots that lost their module."""
        pruned: list[str] = []
        if isinstance(self.model, GrowingModel):
            # Live modules, and fossils that the snapshot lacks, leave the model and the optimizer.
            saved = {parameter for parameter, _ in self._copies.parameters}
            seeds = self.model.seeds
            pruned = [
                name for name, seed in seeds.items() if not (seed.fossilized and saved.issuperset(seed.parameters()))
            ]
            removed: set[Tensor] = set()
            for name in pruned:
                removed.update(seeds[name].parameters())
                self.model.slots[name].remove()
            for group in self.optimizer.param_groups:
                group["params"][:] = [parameter for parameter in group["params"] if parameter not in removed]
        # Into the model's own tensors; what was pruned since has no place any more.
        present = set(self.model.parameters())
        for parameter, saved in self._copies.parameters:
            if parameter in present:
                parameter.copy_(saved)
        for module, name, saved in self._copies.buffers:
            module.get_buffer(name).copy_(saved)
        if isinstance(self.model, GrowingModel):
            self.model.copies.reset_mirrors(self.model)
        for generator, state in self._copies.generators:
            generator.set_state(state)
        # Momentum from before would push straight back.
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        return tuple(pruned)

    def is_finite(self, *, gradients: bool = True) -> bool:
        """Whether all parameters of the model and moments of the optimizer are finite, and the ``gradients`` too."""
        parameters = list(self.model.parameters())
        arrived = [parameter.grad for parameter in parameters if parameter.grad is not None] if gradients else []
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*parameters, *arrived, *(value for value in moments if isinstance(value, Tensor))]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """The copies as plain values: as large as the model."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        places = {(module, name): path for path, module, name in _list_buffers(self.model)}
        parameters, buffers, generators = self._copies
        return to_plain(
            {
                # Tensors that have left the model since would not be restored anyway.
                "parameters": {names[owner]: saved for owner, saved in parameters if owner in names},
                "buffers": {places[module, name]: saved for module, name, saved in buffers if (module, name) in places},
                "generators": {self._names[each]: state for each, state in generators},
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called; the model has the structure that it had then.

        It may be on another device: a rollback then leaves the generator of that device as it is.
        """
        parameters = dict(self.model.named_parameters())
        buffers = {path: (module, name) for path, module, name in _list_buffers(self.model)}
        tensors = {**parameters, **{path: module.get_buffer(name) for path, (module, name) in buffers.items()}}
        unknown = [name for name in (*state["parameters"], *state["buffers"]) if name not in tensors]
        if unknown:
            raise CheckpointError(f"the governor's snapshot holds {unknown[0]!r}, which this model lacks")
        known = [each for each in self._generators if self._names[each] in state["generators"]]
        like = {
            "parameters": {name: tensors[name] for name in state["parameters"]},
            "buffers": {name: tensors[name] for name in state["buffers"]},
            "generators": {self._names[each]: each.get_state() for each in known},
        }
        own = {**state, "generators": {self._names[each]: state["generators"][self._names[each]] for each in known}}
        saved = from_plain(like, own, "the governor's snapshot")
        self._copies = _Copies(
            [(parameters[name], value) for name, value in saved["parameters"].items()],
            [(*buffers[path], value) for path, value in saved["buffers"].items()],
            [(each, saved["generators"][self._names[each]]) for each in known],
        )


def describe_rollback(intervention: Intervention, loss: float, pruned: Sequence[str]) -> Rollback | None:
    """The rollback of a single model at that training loss; None if there was none."""
    if not intervention.rows[0]:
        return None
    return Rollback(Trouble(intervention.trouble[0]), loss, float(intervention.loss_restored[0]), tuple(pruned))


def require_rollbacks_left(intervention: Intervention, governor: Governor) -> None:
    """Stop the training of a single model that has used up its rollbacks."""
    if intervention.exhausted[0]:
        assert governor.settings is not None
        raise DivergedError(
            f"training diverged again ({_REASONS[Trouble(intervention.trouble[0])]}) after "
            f"{governor.settings.max_rollbacks} rollbacks: the model is in its last good state; lower the learning "
            "rate, or check the data and the loss"
        )


def _list_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """All buffers but the alphas of modules, which belong to the lifecycle: path, module that holds it, name there."""
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if not isinstance(module, Seed):
            for name, _ in module.named_buffers(recurse=False):
                yield f"{path}.{name}".removeprefix("."), module, name
