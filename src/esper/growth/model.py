"""One host with its slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.probe import probe_sites
from esper.growth.slot import InputTap, Slot


class Seed(nn.Module):
    """A blueprint's module in a slot, blended in by addition: ``features + alpha * s(features)``."""

    alpha: Tensor

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.fossilized = False
        self.register_buffer("alpha", torch.zeros(()))

    def forward(self, features: Tensor, inputs: Tensor) -> Tensor:
        return features + self.alpha * self.blueprint(features, inputs)


class GrowingModel(nn.Module):
    """A host and its growth slots. ``host`` keeps its own state-dict keys; what grows lives under ``slots``.

    Slots are named after the submodules they hook; a dot in a name becomes a dash in the state-dict keys, where a dot
    means nesting.

    Raises:
        SlotError: as `esper.growth.probe.probe_sites`.
    """

    def __init__(self, host: nn.Module, slots: Sequence[str], example_input: Tensor) -> None:
        super().__init__()
        sites = probe_sites(host, slots, example_input)
        self.host = host
        self.tap = InputTap()
        host.register_forward_pre_hook(self.tap)
        self.slots = nn.ModuleDict()
        for name, site in sites.items():
            slot = Slot(name, site, self.tap)
            host.get_submodule(name).register_forward_hook(slot)
            self.slots[name.replace(".", "-")] = slot

    def forward(self, inputs: Tensor) -> Tensor:
        return self.host(inputs)

    def slot(self, name: str) -> Slot:
        """The slot on submodule ``name``; raises SlotError if there is none."""
        key = name.replace(".", "-")
        if key not in self.slots:
            raise SlotError(f"no slot {name!r}; this model has {', '.join(self.slot_names)}")
        slot = self.slots[key]
        assert isinstance(slot, Slot)
        return slot

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the hooked submodules, in the order given."""
        return tuple(slot.name for slot in self.slots.children() if isinstance(slot, Slot))

    def germinate(self, name: str, blueprint: str, generator: torch.Generator) -> Seed:
        """Put a fresh seed with alpha 0 into slot ``name`` and return it.

        Raises:
            UnknownBlueprintError: no such blueprint.
            SlotError: no such slot, the slot is taken, or the blueprint does not serve the slot's layout.
        """
        slot = self.slot(name)
        kind = get(blueprint)
        if slot.occupant is not None:
            raise SlotError(f"slot {name!r} is taken; prune its seed first")
        if not kind.serves(slot.site):
            raise SlotError(f"blueprint {blueprint!r} does not serve {slot.site.layout} features at slot {name!r}")
        seed = Seed(kind(slot.site, generator))
        slot.occupant = seed
        return seed

    def fossilize(self, name: str) -> None:
        """Make the seed in slot ``name`` part of the model for good; raises SlotError if there is none."""
        if name not in self.seeds:
            raise SlotError(f"slot {name!r} holds no seed to fossilize; germinate one first")
        self.seeds[name].fossilized = True

    def prune(self, name: str) -> None:
        """Empty slot ``name``."""
        self.slot(name).occupant = None

    @property
    def seeds(self) -> dict[str, Seed]:
        """The seeds by slot, live and fossilized."""
        occupants = {name: self.slot(name).occupant for name in self.slot_names}
        return {name: seed for name, seed in occupants.items() if isinstance(seed, Seed)}
