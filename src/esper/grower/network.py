"""One model as controllers see it: a population of one. Arrays have the axes of populations, with E = 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from esper.engine.budget import Budget, Charge, Cost, Costs, RentBasis, affordable_blueprints, budget_left
from esper.errors import ConfigError
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.model import GrowingModel
from esper.growth.seed import count_blend_flops, count_blend_parameters
from esper.growth.site import Layout, Site
from esper.lifecycle.actions import Blend, Head
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.lifecycle.transitions import Step, Transitions, add_fossils, remove_seeds, step
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import module_generator
from esper.serialization.state_files import from_plain, to_plain

BYTES_PER_VALUE = 4
COPIES = 4
"""Values kept per parameter: itself, its gradient and two moments, as with AdamW."""


class Catalogue:
    """What the slots of a model offer: an `esper.engine.observation.GrowthSpec`."""

    def __init__(self, model: GrowingModel, optimizer: torch.optim.Optimizer) -> None:
        self._slots = model.slots.values()
        self._optimizer = optimizer
        names = dict.fromkeys(name for slot in self._slots for name in slot.blueprints)
        self.kinds: Sequence[type[Blueprint]] = [get(name) for name in names]
        """Every blueprint that is on offer in some slot, in the order of the slots."""
        parameters = self._cost(lambda kind, site: kind.parameters_at(site), count_blend_parameters)
        flops = self._cost(lambda kind, site: kind.flops_at(site), count_blend_flops)
        self.costs = Costs(parameters, flops, parameters.scale(BYTES_PER_VALUE * COPIES))
        """What seeds cost; 0 for blueprints that are not on offer in a slot."""
        self.widths: Ints = np.array([[slot.site.width for slot in self._slots]])
        """Channels at each slot."""
        self._offered = np.array([[kind.name in slot.blueprints for kind in self.kinds] for slot in self._slots])

    @property
    def compatible(self) -> Bools:
        """Whether a blueprint may germinate in a slot."""
        enabled = np.array([slot.enabled for slot in self._slots])
        return (self._offered & enabled[:, None])[None]

    @property
    def learning_rates(self) -> Floats:
        """The host's learning rate, as it is now."""
        return np.array([float(self._optimizer.param_groups[0]["lr"])])

    def _cost(
        self, of_blueprint: Callable[[type[Blueprint], Site], int], of_blend: Callable[[Blend, Site], int]
    ) -> Cost:
        blueprints = [
            [of_blueprint(kind, slot.site) if kind.name in slot.blueprints else 0 for kind in self.kinds]
            for slot in self._slots
        ]
        blends = [[of_blend(blend, slot.site) for blend in Blend] for slot in self._slots]
        return Cost(np.array([blueprints]), np.array([blends]))


class GrowingNetwork:
    """A growing model with its lifecycle table: an `esper.engine.observation.GrowingNetworks` of one."""

    def __init__(
        self, model: GrowingModel, optimizer: torch.optim.Optimizer, budget: Budget, rent_on: RentBasis
    ) -> None:
        self.model = model
        self.specs = ModelSpec(model, optimizer)
        self.charge = self._choose_charge(rent_on)
        """What rent is paid on, and what controllers see costs in."""
        self.blueprints = [kind.name for kind in self.specs.kinds]
        """Names of all that may grow."""
        self.budget = budget
        self.table = self._first_table(model)
        self.evidence = Evidence.none(1, len(model.slots))
        self.germinations: Ints = np.zeros(len(model.slots), np.int64)
        """Seeds that each slot has had, ``[S]``."""
        self.host_parameters: Ints = np.array([model.host_parameters])
        self._layouts = [slot.site.layout for slot in model.slots.values()]

    def _choose_charge(self, rent_on: RentBasis) -> Charge:
        """Costs in parameters, or in FLOPs of a forward pass for one example."""
        if rent_on == "parameters":
            return Charge(self.specs.costs.parameters, np.array([self.model.host_parameters]))
        if self.model.host_flops is None:
            raise ConfigError("rent_on is 'flops', but torch cannot count those of this model's host: say 'parameters'")
        return Charge(self.specs.costs.flops, np.array([self.model.host_flops]))

    def _first_table(self, model: GrowingModel) -> SeedTable:
        """Empty slots, and fossils where the model has some already."""
        shape = (1, len(model.slots))
        blueprints, blends = np.full(shape, NO_BLUEPRINT, np.int64), np.zeros(shape, np.int64)
        for place, slot in enumerate(model.slots.values()):
            if slot.seed is not None and slot.seed.fossilized:
                blueprints[0, place], blends[0, place] = (
                    self.blueprints.index(slot.seed.blueprint.name),
                    slot.seed.blend,
                )
        everything = np.ones(self.specs.compatible.shape, np.bool_)
        return add_fossils(SeedTable.dormant(*shape), blueprints, blends, everything)[0]

    def affordable(self, blends: Sequence[Blend]) -> Bools:
        """Which blueprints the budget still allows in which slots, with any of these ``blends``."""
        return self.affordable_beside(self.table, blends)

    def affordable_beside(self, table: SeedTable, blends: Sequence[Blend]) -> Bools:
        """As `affordable`, were ``table`` that of this network."""
        return affordable_blueprints(self.budget, self.specs.costs, table, blends)

    @property
    def budget_left(self) -> Floats:
        """The share of the scarcest cap that is not spent yet."""
        return budget_left(self.budget, self.specs.costs, self.table)

    def state_dict(self) -> dict[str, Any]:
        """The table and what belongs to it."""
        return to_plain(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of other slots.
        """
        values = from_plain(self._state, state, "the subject")
        self.table, self.evidence, self.germinations = values["table"], values["evidence"], values["germinations"]

    @property
    def _state(self) -> dict[str, Any]:
        return {"table": self.table, "evidence": self.evidence, "germinations": self.germinations}

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Whether the slot's features have this layout."""
        return np.array([[one is layout for one in self._layouts]])

    def advance(self, actions: Ints, rules: Rules) -> Step:
        """What the lifecycle makes of these actions ``[1, 8]``; nothing has changed yet."""
        affordable = self.affordable(rules.blends)
        return step(self.table, self.evidence, actions, rules, self.specs.compatible, affordable)

    def apply(self, changes: Transitions, actions: Ints, seed: int) -> None:
        """Plant the seeds that came in ``changes``, remove those that went, fossilize those that stay for good.

        Whatever may fail, which is making a seed, comes first; then nothing has changed yet.
        """
        slots = self.model.slots.values()
        for place in changes.slot[changes.after == Stage.GERMINATED].tolist():
            generator = module_generator(seed, place, int(self.germinations[place]))
            kind = self.specs.kinds[int(actions[0, Head.BLUEPRINT])]
            slots[place].germinate(kind.name, generator, blend=Blend(int(actions[0, Head.BLEND])))
            self.germinations[place] += 1
        for place in changes.slot[changes.after == Stage.PRUNED].tolist():
            slots[place].prune()
        for place in changes.slot[changes.after == Stage.FOSSILIZED].tolist():
            slots[place].fossilize()
        fresh = (changes.after == Stage.GERMINATED) | (changes.after == Stage.PRUNED)
        gone = np.zeros((1, len(slots)), np.bool_)
        gone[0, changes.slot[fresh]] = True
        self.evidence = self.evidence.without(gone)

    def revoke(self, gone: Bools) -> Transitions:
        """Empty the slots ``gone`` ``[1, S]``, whose seeds were taken by another hand; returns what changed."""
        self.table, changes = remove_seeds(self.table, gone)
        self.evidence = self.evidence.without(gone)
        return changes

    def weigh_seeds(self, isolation: Isolation) -> None:
        """Give every seed the weight that the table says, and let it learn from its second step on."""
        for place, slot in enumerate(self.model.slots.values()):
            seed = slot.seed
            if seed is None or seed.fossilized:
                continue
            stage = Stage(int(self.table.stage[0, place]))
            seed.alpha.fill_(float(self.table.alpha[0, place]))
            seed.isolation = isolation if stage is Stage.TRAINING else Isolation.NONE
            seed.requires_grad_(stage is not Stage.GERMINATED)
            self.model.copies.sync_slot(slot)
