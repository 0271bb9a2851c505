"""One growing model with its lifecycle table, as networks of the growth engine: E is 1 in all arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from esper.engine.budget import Budget, Charge, Cost, Costs, RentBasis, affordable_blueprints, budget_left
from esper.errors import CheckpointError, ConfigError
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.model import GrowingModel
from esper.growth.seed import count_blend_parameters
from esper.growth.site import Layout, Site
from esper.lifecycle.actions import Blend, Curve, Head
from esper.lifecycle.legality import ActionMasks, legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.lifecycle.transitions import (
    Step,
    Transitions,
    add_fossils,
    clear_changed_evidence,
    remove_seeds,
    step,
)
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import module_generator
from esper.serialization.state_files import from_plain, to_plain

BYTES_PER_VALUE = 4
COPIES = 4
"""Values in memory per parameter: itself, its gradient and two moments, as with AdamW."""


class ModelSpec:
    """Blueprints, their costs and compatibility, for the slots of one model."""

    def __init__(self, model: GrowingModel, optimizer: torch.optim.Optimizer) -> None:
        self._slots = model.slots.values()
        self._optimizer = optimizer
        names = dict.fromkeys(name for slot in self._slots for name in slot.blueprints)
        self.kinds: Sequence[type[Blueprint]] = [get(name) for name in names]
        """Every blueprint that some slot offers, in the order of the slots."""
        blends = [[count_blend_parameters(blend, slot.site) for blend in Blend] for slot in self._slots]
        parameters = Cost(self._count(lambda kind, site: kind.parameters_at(site)), np.array([blends]))
        flops = Cost.of_blueprints(self._count(lambda kind, site: kind.flops_at(site)))
        self.costs = Costs(parameters, flops, parameters.scale(BYTES_PER_VALUE * COPIES))
        """Costs of modules; 0 for blueprints that a slot does not offer."""
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

    def _count(self, count: Callable[[type[Blueprint], Site], int]) -> Ints:
        """``count`` of every blueprint at the site of every slot that offers it, ``[1, S, K]``; elsewhere 0."""
        counts = [
            [count(kind, slot.site) if kind.name in slot.blueprints else 0 for kind in self.kinds]
            for slot in self._slots
        ]
        return np.array([counts])


class GrowingNetwork:
    """A growing model with its lifecycle table: the networks of a `GrowthBackend`, with E = 1.

    The initial values of modules follow from ``random_seed``.
    """

    def __init__(
        self,
        model: GrowingModel,
        spec: ModelSpec,
        budget: Budget,
        rent_on: RentBasis,
        rules: Rules,
        random_seed: int,
    ) -> None:
        self.model, self.rules = model, rules
        self.specs = spec
        self.blueprints = [kind.name for kind in spec.kinds]
        """Names of all blueprints that some slot offers."""
        self.budget = budget
        self.host_parameters: Ints = np.array([model.host_parameters])
        if rent_on == "parameters":
            self.charge = Charge(spec.costs.parameters, self.host_parameters)
        elif model.host_flops is None:
            raise ConfigError(f"rent_on is 'flops', but torch cannot count {model.uncounted_flops}: say 'parameters'")
        else:
            self.charge = Charge(spec.costs.flops, np.array([model.host_flops]))
        """What rent is paid on, and the costs that controllers see."""
        # Empty slots, and fossils where the model has some already.
        shape = (1, len(model.slots))
        blueprints, blends = np.full(shape, NO_BLUEPRINT, np.int64), np.zeros(shape, np.int64)
        for place, slot in enumerate(model.slots.values()):
            if slot.seed is not None and slot.seed.fossilized:
                blueprints[0, place] = self.blueprints.index(slot.seed.blueprint.name)
                blends[0, place] = slot.seed.blend
        everything = np.ones(spec.compatible.shape, np.bool_)
        self.table = add_fossils(SeedTable.dormant(*shape), blueprints, blends, everything)[0]
        self.evidence = Evidence.none(1, len(model.slots))
        self.germinations: Ints = np.zeros(len(model.slots), np.int64)
        """Modules that each slot has had, ``[S]``."""
        self._random_seed = random_seed
        self._layouts = [slot.site.layout for slot in model.slots.values()]

    def affordable(self, table: SeedTable | None = None) -> Bools:
        """Which blueprints the budget allows in which slots, ``[1, S, K]``, beside the modules in ``table``.

        Without an argument it is the table of this network.
        """
        return affordable_blueprints(
            self.budget, self.specs.costs, self.table if table is None else table, self.rules.blends
        )

    @property
    def budget_left(self) -> Floats:
        """The fraction of the scarcest cap that is not spent yet, ``[1]``."""
        return budget_left(self.budget, self.specs.costs, self.table)

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Whether the slot's features have this layout, ``[1, S]``."""
        return np.array([[slot_layout is layout for slot_layout in self._layouts]])

    def legal_actions(self) -> ActionMasks:
        """The actions that rules, evidence and budget allow now."""
        return legal_actions(self.table, self.evidence, self.rules, self.specs.compatible, self.affordable())

    def decide(self, actions: Ints) -> Step:
        """Carry out one action ``[1, 8]``, and advance all other slots by a step; all of it or nothing."""
        result = step(self.table, self.evidence, actions, self.rules, self.specs.compatible, self.affordable())
        blueprint, blend = int(actions[0, Head.BLUEPRINT]), Blend(int(actions[0, Head.BLEND]))
        self.change_slots(result.table, result.transitions, blueprint, blend)
        return result

    def change_slots(
        self, table: SeedTable, changes: Transitions, blueprint: int = NO_BLUEPRINT, blend: Blend = Blend.ADD
    ) -> None:
        """Plant, prune and fossilize modules as ``changes`` require, which lead to ``table``.

        ``blueprint`` and ``blend`` are those of the module that germinates, if any.
        """
        # Germination comes first: making a module may fail, and then nothing has changed.
        slots = self.model.slots.values()
        for place in changes.slot[changes.after == Stage.GERMINATED].tolist():
            generator = module_generator(self._random_seed, place, int(self.germinations[place]))
            slots[place].plant(slots[place].make_seed(self.blueprints[blueprint], generator, blend))
            self.germinations[place] += 1
        for place in changes.slot[changes.after == Stage.PRUNED].tolist():
            slots[place].prune()
        for place in changes.slot[changes.after == Stage.FOSSILIZED].tolist():
            slots[place].fossilize()
        self.evidence = clear_changed_evidence(self.evidence, changes)
        self.table = table
        self.update_seeds()

    def revoke(self, empty: Bools) -> Transitions:
        """Update the table after a rollback has removed the modules in the slots ``empty``, bool ``[1, S]``."""
        self.table, changes = remove_seeds(self.table, empty)
        self.evidence = clear_changed_evidence(self.evidence, changes)
        return changes

    def update_seeds(self) -> None:
        """Set the alpha of every module by the table; a module learns from its second decision on."""
        for place, slot in enumerate(self.model.slots.values()):
            seed = slot.seed
            if seed is None or seed.fossilized:
                continue
            seed.alpha.fill_(float(self.table.alpha[0, place]))
            seed.requires_grad_(bool(self.table.stage[0, place] != Stage.GERMINATED))
            self.model.copies.sync_slot(slot)

    def state_dict(self) -> dict[str, Any]:
        """Table, evidence and germinations, as plain values."""
        return to_plain(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        values = from_plain(self._state(), state, "the network")
        table: SeedTable = values["table"]
        kinds = {"stage": len(Stage), "blend": len(Blend), "alpha_curve": len(Curve), "blueprint": len(self.blueprints)}
        for name, numbers in cast("dict[str, Floats]", vars(table)).items():
            low = NO_BLUEPRINT if name == "blueprint" else 0
            # Others are weights, ages and numbers of steps.
            high = kinds[name] - 1 if name in kinds else 1 if numbers.dtype == np.float32 else 2**15 - 1
            if not np.all((numbers >= low) & (numbers <= high)):
                raise CheckpointError(
                    f"the grower's state is damaged: {name} is {numbers.tolist()[0]} in its table, where "
                    f"numbers are from {low} to {high}; use an earlier one"
                )
        self.table, self.evidence, self.germinations = values["table"], values["evidence"], values["germinations"]

    def _state(self) -> dict[str, Any]:
        return {"table": self.table, "evidence": self.evidence, "germinations": self.germinations}
