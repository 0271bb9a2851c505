"""Snapshots of one model that any optimizer trains, and its rollbacks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.engine.governor import Governor, Intervention, Trouble
from esper.errors import CheckpointError, DivergedError
from esper.growth.model import GrowingModel
from esper.growth.optimizers import unwrap_optimizer
from esper.growth.seed import Seed
from esper.numerics.module_state import global_generators
from esper.serialization.state_files import from_plain, to_plain

_NOT_RESTORED = ("params", "lr", "initial_lr")
"""Entries of an optimizer's groups that a rollback leaves as they are."""
_CALLER = 8
"""Calls between a warning and the loop that called `esper.Grower.step`."""
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


class ModelSnapshot:
    """A copy of a model, its optimizer's state and torch's global random generators, to return to.

    All is copied by name, and written back into the model's own tensors, which the optimizer goes on owning. Live
    modules are pruned and leave the optimizer; so does a fossil that germinated after the snapshot. Of the optimizer
    ``state`` and ``param_groups`` return, but not the learning rates, which are the scheduler's. What an optimizer
    keeps elsewhere is not known here and stays.
    """

    def __init__(self, model: GrowingModel, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, unwrap_optimizer(optimizer)
        self._generators = {f"{place} on {each.device}": each for place, each in enumerate(global_generators(model))}
        self._seeds: dict[str, Seed] = {}
        """The modules in the snapshot, by slot."""
        self._values: dict[str, Tensor] = {}
        self._moments: dict[str, dict[str, Any]] = {}
        """The optimizer's state, by the names of parameters."""
        self._groups: list[dict[str, Any]] = []
        self._random: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state."""
        state, groups = self.optimizer.state, self.optimizer.param_groups
        named = self.model.named_parameters()
        self._seeds = self.model.seeds
        self._values = {name: tensor.clone() for name, tensor in self._name_tensors().items()}
        self._moments = {name: copy.deepcopy(state[parameter]) for name, parameter in named if parameter in state}
        kept = [{key: value for key, value in group.items() if key not in _NOT_RESTORED} for group in groups]
        self._groups = copy.deepcopy(kept)
        self._random = {name: generator.get_state() for name, generator in self._generators.items()}

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Return to the state of `take`; returns the slots that lost their module."""
        # Live modules, and fossils that the snapshot lacks, leave the model and the optimizer.
        model, optimizer, seeds = self.model, self.optimizer, self.model.seeds
        pruned = [slot for slot, seed in seeds.items() if not (seed.fossilized and self._seeds.get(slot) is seed)]
        for slot in pruned:
            model.slots[slot].remove()
        # What was pruned since the snapshot has no place any more.
        for name, tensor in self._name_tensors().items():
            if name in self._values:
                tensor.copy_(self._values[name])
        model.copies.reset_mirrors(model)
        # The optimizer's objects are changed in place, since wrappers share them.
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            optimizer.state.pop(parameter, None)
            if name in self._moments:
                optimizer.state[parameter] = copy.deepcopy(self._moments[name])
        for group, values in zip(optimizer.param_groups, self._groups, strict=False):
            group.update(copy.deepcopy(values))
        for name, state in self._random.items():
            self._generators[name].set_state(state)
        parameters = set(model.parameters())
        if any(key not in parameters for key in optimizer.state):
            warnings.warn(
                "the optimizer also holds a state of what is not in the growing model, which a rollback does not know: "
                "it stays as it is",
                stacklevel=_CALLER,
            )
        return pruned

    def is_finite(self, *, gradients: bool = True) -> bool:
        """Whether all parameters of the model and moments of the optimizer are finite, and the ``gradients`` too."""
        parameters = list(self.model.parameters())
        arrived = [parameter.grad for parameter in parameters if parameter.grad is not None] if gradients else []
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*parameters, *arrived, *(value for value in moments if isinstance(value, Tensor))]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """The copies as plain values, without those of modules that are gone."""
        new = [seed for slot, seed in self.model.seeds.items() if self._seeds.get(slot) is not seed]
        new_tensors = {tensor for seed in new for tensor in (*seed.parameters(), *seed.buffers())}
        kept = {name for name, tensor in self._name_tensors().items() if tensor not in new_tensors}
        return to_plain(
            {
                "values": {name: value for name, value in self._values.items() if name in kept},
                "moments": {name: value for name, value in self._moments.items() if name in kept},
                # What is not plain a resumed optimizer has from whoever constructs it.
                "groups": [{key: each for key, each in group.items() if _is_plain(each)} for group in self._groups],
                "generators": self._random,
                "optimizer": type(self.optimizer).__name__,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called; the model has the structure that it had then.

        Generators of devices that are not here, and the state of another kind of optimizer, mean nothing.
        """
        tensors, parameters = self._name_tensors(), dict(self.model.named_parameters())
        unknown = next((name for name in state["values"] if name not in tensors), None)
        unknown = unknown or next((name for name in state["moments"] if name not in parameters), None)
        if unknown is not None:
            raise CheckpointError(f"the governor's snapshot holds {unknown!r}, which this model lacks")
        like = {name: tensors[name] for name in state["values"]}
        self._values = from_plain(like, state["values"], "the governor's snapshot")
        saved = {tensors[name] for name in self._values}
        self._seeds = {slot: seed for slot, seed in self.model.seeds.items() if saved.issuperset(seed.parameters())}
        random = {name: each.get_state() for name, each in self._generators.items() if name in state["generators"]}
        saved_random = {name: state["generators"][name] for name in random}
        self._random = from_plain(random, saved_random, "the governor's snapshot")
        same = state["optimizer"] == type(self.optimizer).__name__
        # Tuples such as betas are saved as lists.
        self._groups = [
            {key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value for key, value in group.items()}
            for group in (state["groups"] if same else ())
        ]
        self._moments = {}
        saved_moments: dict[str, dict[str, Any]] = state["moments"] if same else {}
        for name, kept in saved_moments.items():
            present, device = self.optimizer.state.get(parameters[name], {}), parameters[name].device
            moments = dict(kept)
            for key, value in kept.items():
                # Each goes where the optimizer has it now; without a state, counts of steps stay on the CPU.
                if isinstance(value, Tensor):
                    elsewhere = device if value.dim() else "cpu"
                    moments[key] = value.to(present[key].device if key in present else elsewhere)
            self._moments[name] = moments

    def _name_tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers by name, but the alphas of modules, which belong to the lifecycle."""
        buffers: dict[str, Tensor] = {}
        for path, module in cast("Iterable[tuple[str, nn.Module]]", self.model.named_modules()):
            if not isinstance(module, Seed):
                buffers |= dict(module.named_buffers(path, recurse=False))
        return {**dict(self.model.named_parameters()), **buffers}


def _is_plain(value: object) -> bool:
    """Whether ``value``, an entry of an optimizer's group, can be saved."""
    parts = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
    return all(part is None or isinstance(part, Tensor) or type(part) in (bool, int, float, str) for part in parts)


def describe_rollback(intervention: Intervention, loss: float, slots: Sequence[str]) -> Rollback | None:
    """The rollback of a single model at that training loss; None if there was none."""
    if not intervention.rows[0]:
        return None
    pruned = tuple(slots[place] for place in cast("list[int]", intervention.transitions.slot.tolist()))
    return Rollback(Trouble(intervention.trouble[0]), loss, float(intervention.loss_restored[0]), pruned)


def require_rollbacks_left(intervention: Intervention, governor: Governor) -> None:
    """Stop the training of a single model that has used up its rollbacks."""
    if intervention.exhausted[0]:
        assert governor.settings is not None
        raise DivergedError(
            f"training diverged again ({_REASONS[Trouble(intervention.trouble[0])]}) after "
            f"{governor.settings.max_rollbacks} rollbacks: the model is in its last good state; lower the learning "
            "rate, or check the data and the loss"
        )
