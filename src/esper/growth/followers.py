"""What all slots of a model share: the optimizer of what grows, copies that grow as well, and counts of graphs."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from esper.errors import SlotError

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel
    from esper.growth.slot import Slot


SLOT_KEY = "slot"
"""Key of a parameter group that belongs to a slot; its value is the slot's name."""

SLOTS_PREFIX = "slots."
"""Begins the names of what grows among a model's parameters."""

_SHOWN = 3
"""Names of forgotten parameters in a warning."""

Named = Callable[[], Iterable[tuple[str, nn.Parameter]]]


class Ownership:
    """Hands the parameters of seeds to an optimizer whose groups `GrowingModel.parameter_groups` made.

    Every slot has had a group from the start, so no group is ever added, which schedulers would not survive. Shared by
    all slots of a model; copies of the model begin without an optimizer.
    """

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self._watch: _Watch | None = None

    def link(self, optimizer: torch.optim.Optimizer, slots: Iterable[str], named_parameters: Named) -> None:
        """Give all seeds to ``optimizer`` from now on.

        Before its first step, and its first after each germination, it warns of parameters of the host that it lacks.
        Where the model was converted to another type, as by ``model.double()``, what it remembers is converted too.

        Raises:
            SlotError: a slot has no group, or several, or the groups are of another model; from the optimizer's steps,
                if it lacks the parameters of a seed.
        """
        groups = Counter(group.get(SLOT_KEY) for group in optimizer.param_groups)
        missing = [name for name in slots if name not in groups]
        split = [name for name in slots if groups[name] > 1]
        if split:
            raise SlotError(
                f"the optimizer has {groups[split[0]]} parameter groups for slot {split[0]!r}, and what grows there "
                "can go to one of them alone: leave the groups of slots as model.parameter_groups(lr=...) made them; "
                "those of the host may be split"
            )
        if missing:
            raise SlotError(
                f"the optimizer has no parameter group for slot {missing[0]!r}: "
                "make it from model.parameter_groups(lr=...)"
            )
        owned = {
            parameter for group in optimizer.param_groups if SLOT_KEY not in group for parameter in group["params"]
        }
        if owned and owned.isdisjoint(parameter for _, parameter in named_parameters()):
            raise SlotError(
                "the optimizer's groups hold no parameter of this model: it was made for another one, for a copy, or "
                "before it was sharded; make it from this model's model.parameter_groups(lr=...)"
            )
        if self._watch is not None:
            self._watch.handle.remove()
        self.optimizer = optimizer
        self._watch = _Watch(optimizer, named_parameters)

    def add_parameters(self, slot: str, parameters: Sequence[nn.Parameter]) -> None:
        """The optimizer trains these, too."""
        if self.optimizer is not None and self._watch is not None:
            self._group(self.optimizer, slot).extend(parameters)
            self._watch.due = True

    def remove_parameters(self, slot: str, parameters: Sequence[nn.Parameter]) -> None:
        """The optimizer forgets these and all it knew of them."""
        if self.optimizer is None:
            return
        gone = set(parameters)
        group = self._group(self.optimizer, slot)
        group[:] = [parameter for parameter in group if parameter not in gone]
        for parameter in gone:
            self.optimizer.state.pop(parameter, None)

    @staticmethod
    def _group(optimizer: torch.optim.Optimizer, slot: str) -> list[nn.Parameter]:
        return next(group["params"] for group in optimizer.param_groups if group.get(SLOT_KEY) == slot)

    def __getstate__(self) -> dict[str, Any]:
        return vars(Ownership())


class _Watch:
    """Before each step of an optimizer: it must own all seeds, and what it remembers must have the parameters' type."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Named) -> None:
        self._named_parameters = named_parameters
        self.due = True
        """Whether parameters have come that the optimizer may lack."""
        self._dtype = _dtype_of(optimizer)
        self.handle = optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._dtype != (
            dtype := _dtype_of(optimizer)
        ):  # the model was converted; so are moments, where it loads them
            optimizer.load_state_dict(optimizer.state_dict())
            self._dtype = dtype
        if self.due:
            self.due = False
            self._look(optimizer)

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        lacking = [(name, parameter) for name, parameter in self._named_parameters() if parameter not in owned]
        of_seeds = next((name for name, _ in lacking if name.startswith(SLOTS_PREFIX)), None)
        if of_seeds is not None:
            raise SlotError(
                f"the optimizer lacks {of_seeds!r} of a seed, which would never learn: leave the groups of slots as "
                "they are, or make the optimizer anew from model.parameter_groups(lr=...)"
            )
        forgotten = [name for name, parameter in lacking if parameter.requires_grad]
        if forgotten:
            shown = ", ".join(forgotten[:_SHOWN]) + (", ..." if len(forgotten) > _SHOWN else "")
            warnings.warn(
                f"{len(forgotten)} trainable parameters belong to no group of the optimizer and will not learn: {shown}"
                "; make the optimizer from model.parameter_groups(lr=...)",
                stacklevel=4,
            )


def _dtype_of(optimizer: torch.optim.Optimizer) -> torch.dtype | None:
    return next((parameter.dtype for group in optimizer.param_groups for parameter in group["params"]), None)


class Copies:
    """The copies of one model; its slots call it at every change. A copy of the model has one of its own.

    An average of weights over training (EMA, SWA) is a copy whose tensors are mixed, one by one and in their order,
    with those of the model: it must have the same seeds at any time. A fresh seed in it begins as the model's own; its
    weight, stage and isolation are the model's; all else is whatever the average makes of it. Copies are known weakly:
    they live no longer for being known.
    """

    def __init__(self) -> None:
        self.released = False
        """Whether the model to which this belongs has no slots any more, and so cannot grow."""
        self._mirrors: WeakSet[GrowingModel] = WeakSet()
        self._unasked: WeakSet[Copies] = WeakSet()
        """What belongs to copies about which nobody said anything."""
        self._warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        made = Copies()
        memo[id(self)] = made
        self._unasked.add(made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()

    def add_mirror(self, mirror: GrowingModel, slots: Iterable[Slot]) -> None:
        """Let ``mirror`` be from now on what the ``slots`` of the model are."""
        self._mirrors.add(mirror)
        self._unasked.discard(mirror.copies)
        for slot in slots:
            self.sync_slot(slot)

    @property
    def mirrored(self) -> bool:
        """Whether there are any that are to grow as the model does."""
        return bool(self._mirrors)

    def unregister(self, other: Copies) -> None:
        """The copy to which ``other`` belongs goes its own way."""
        self._unasked.discard(other)

    def sync_slot(self, slot: Slot) -> None:
        """Let the same live in the mirrors as in ``slot`` of the model."""
        for mirror in self._mirrors:
            _sync_seed(slot, mirror.slots[slot.name])

    def sync_seed_change(self, slot: Slot) -> None:
        """`sync_slot` where a seed came or went; warns once of copies that are no mirrors."""
        self.sync_slot(slot)
        if self._warned or all(unasked.released for unasked in self._unasked):
            return
        self._warned = True
        warnings.warn(
            f"what grows in slot {slot.name!r} is not in a copy that was made of the model before: if the copy is an "
            "average of its weights, say model.mirror(average) when you make it; a snapshot needs nothing",
            stacklevel=4,
        )

    @torch.no_grad()
    def reset_mirrors(self, model: nn.Module) -> None:
        """Let the mirrors have the values of ``model``, whose training went wrong since."""
        for mirror in self._mirrors:
            for theirs, ours in zip(mirror.parameters(), model.parameters(), strict=True):
                theirs.copy_(ours)
            for theirs, ours in zip(mirror.buffers(), model.buffers(), strict=True):
                theirs.copy_(ours)


def _sync_seed(slot: Slot, other: Slot) -> None:
    seed = slot.seed
    if seed is None:
        other.remove()
        return
    present = other.seed
    if present is None or (present.blueprint.name, present.blend) != (seed.blueprint.name, seed.blend):
        other.remove()
        present = other.fit(copy.deepcopy(seed))
        other.occupant = present
        other.depth.set_block(other.name, present.blueprint.find_block())
    with torch.no_grad():
        present.alpha.copy_(seed.alpha)
    present.fossilized, present.isolation, present.contribution = seed.fossilized, seed.isolation, seed.contribution


class Compilations:
    """Counts how often the slots of a growing model were compiled, and ran uncompiled. Copies of the model begin anew.

    `torch.compile` makes a graph of every structure, to learn and to evaluate, and nothing public tells how many it has
    made or keeps: so this counts them as they are made.
    """

    def __init__(self) -> None:
        # No decorator: it loads torch's compiler, which making an optimizer does anyway and importing Esper need not.
        torch.compiler.assume_constant_result(Compilations.record_graph)
        torch.compiler.assume_constant_result(Compilations.count_trace)
        self.traced = 0
        """How often a slot was made part of a graph."""
        self.uncompiled = 0
        """How often a slot ran without being part of one."""
        self.compiled = False
        """Whether the model as a whole ever was, so that its passes are not seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Compilations, ()

    def count_trace(self) -> None:
        """Called once for each graph that a slot is part of, while it is made."""
        self.traced += 1

    def record_graph(self) -> None:
        """Called once for each graph of the whole model, while it is made."""
        self.compiled = True
