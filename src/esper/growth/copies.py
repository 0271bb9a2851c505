"""Deep copies of modules, and copies of a growing model that grow with it, such as averages of its weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from esper.errors import EsperError

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel
    from esper.growth.slot import Slot

T = TypeVar("T")


def copy_with(module: nn.Module, value: T, error: type[EsperError], shared: Iterable[object] = ()) -> T:
    """A deep copy of ``value``, the module or what contains it, in which ``shared`` objects are not copied."""
    # Layers with the old `torch.nn.utils.weight_norm` or `spectral_norm` keep a weight that they compute before each
    # pass. The copy gets its values without the graph.
    memo: dict[int, Any] = {
        id(attribute): attribute.detach().clone()
        for part in module.modules()
        for attribute in vars(part).values()
        if isinstance(attribute, Tensor) and not attribute.is_leaf
    }
    try:
        return copy.deepcopy(value, memo | {id(part): part for part in shared})
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as failure:
        name, reason = type(module).__name__, str(failure).strip().partition("\n")[0].partition(".  ")[0]
        raise error(
            f"{name} cannot be copied ({reason}): let modules keep no locks, open files or generators as attributes, "
            "and no results of a pass in lists"
        ) from failure


class Copies:
    """The copies of one model, which follow changes of its slots; each copy has its own `Copies`.

    In an average of weights over training (EMA, SWA), the tensors of a copy are averaged with those of the model, one
    by one and in order, so the copy must always have the same seeds. Such a copy is a mirror. A new seed in a mirror
    starts with the model's values. Weight and stage are always the model's; everything else comes from the
    average. References to copies are weak.
    """

    def __init__(self) -> None:
        self.released = False
        """Whether the slots were removed from the model of this object, so that it cannot grow."""
        self._mirrors: WeakSet[GrowingModel] = WeakSet()
        self._undeclared: WeakSet[Copies] = WeakSet()
        """The `Copies` of copies that are neither mirrors nor unregistered."""
        self._warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        made = Copies()
        memo[id(self)] = made
        self._undeclared.add(made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()

    def add_mirror(self, mirror: GrowingModel, slots: Iterable[Slot]) -> None:
        """Keep the slots of ``mirror`` equal to the ``slots`` of the model."""
        self._mirrors.add(mirror)
        self._undeclared.discard(mirror.copies)
        for slot in slots:
            self.sync_slot(slot)

    def unregister(self, other: Copies) -> None:
        """Do not expect the copy of ``other`` to grow in the same way as the model."""
        self._undeclared.discard(other)

    def sync_slot(self, slot: Slot) -> None:
        """Copy the seed of ``slot``, or its absence, with weight and stage to the mirrors."""
        seed = slot.seed
        for mirror in self._mirrors:
            other = mirror.slots[slot.name]
            if seed is None:
                other.remove()
                continue
            # Another seed: a copy of this one, because `germinate` would draw other values.
            present = other.seed
            if present is None or (present.blueprint.name, present.blend) != (seed.blueprint.name, seed.blend):
                other.remove()
                present = other.convert_seed(copy.deepcopy(seed))
                other.occupant = present
                other.depth.set_block(other.name, present.blueprint.find_block())
            # The same seed: its weight and stage.
            with torch.no_grad():
                present.alpha.copy_(seed.alpha)
            present.fossilized = seed.fossilized
            present.contribution = seed.contribution

    def sync_seed_change(self, slot: Slot) -> None:
        """`sync_slot` after a seed was planted or removed; warns once about copies that are not mirrors."""
        self.sync_slot(slot)
        # A copy that is neither declared as a mirror nor released may be an average that falls behind.
        if self._warned or all(copies.released for copies in self._undeclared):
            return
        self._warned = True
        warnings.warn(
            f"the new seed in slot {slot.name!r} is missing in an earlier copy of the model: if the copy is an average "
            "of weights, call model.mirror(average) when you make it; if it is a snapshot, ignore this",
            stacklevel=4,
        )

    @torch.no_grad()
    def reset_mirrors(self, model: nn.Module) -> None:
        """Copy the values of ``model``, which was rolled back, into the mirrors."""
        for mirror in self._mirrors:
            for mirrored, values in zip(mirror.parameters(), model.parameters(), strict=True):
                mirrored.copy_(values)
            for mirrored, values in zip(mirror.buffers(), model.buffers(), strict=True):
                mirrored.copy_(values)
