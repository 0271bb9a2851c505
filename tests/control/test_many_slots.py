"""A hundred slots: what a controller sees of each is what it would see if it were the only one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from esper.engine.budget import Charge, Cost, Costs
from esper.engine.gradients import HealthTable
from esper.engine.history import History
from esper.engine.measurements import TrainingReport
from esper.engine.observation import (
    BLUEPRINT_FEATURES,
    SLOT_FEATURES,
    FeatureInputs,
    FeatureReader,
    Observation,
    observe,
)

from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.site import Layout
from esper.lifecycle.actions import Blend
from esper.lifecycle.table import Evidence, SeedTable
from esper.numerics.arrays import Bools, Floats, Ints
from lifecycle.one_slot import ALONE, ENVIRONMENTS, SLOTS, Array, lived, together
from lifecycle.support import DEFAULT, random_compatibility, random_evidence

KINDS = [get(name) for name in ("norm", "mlp", "lowrank", "gate")]
Arrange = Callable[[Array], Array]
"""Makes what is said of networks of one slot each into what is said of others."""


@dataclass
class Offered:
    kinds: Sequence[type[Blueprint]]
    costs: Costs
    compatible: Bools
    widths: Ints
    learning_rates: Floats


@dataclass
class Held:
    """Networks, given by their arrays."""

    specs: Offered
    table: SeedTable
    evidence: Evidence
    host_parameters: Ints
    budget_left: Floats
    layouts: np.ndarray
    """Names ``[E, S]``."""

    def slots_of_layout(self, layout: Layout) -> Bools:
        return self.layouts == layout.value

    @property
    def charge(self) -> Charge:
        return Charge(self.specs.costs.parameters, self.host_parameters)


def alone(array: Array) -> Array:
    return array


def side_by_side(array: Array) -> Array:
    """Slots ``[ALONE, 1, ...]`` in networks of many; of what all slots of a network share, its first slot's."""
    return together(array) if array.shape[1:2] == (1,) else array[::SLOTS]


def view(arranged: Arrange) -> FeatureInputs:
    """Random networks: slots that have lived for a while, and numbers that mean nothing."""
    rng = np.random.default_rng(8)

    def networks() -> Floats:
        return arranged(np.repeat(rng.random(ENVIRONMENTS), SLOTS))

    def slots(*each: int) -> Floats:
        return arranged(rng.normal(size=(ALONE, 1, *each)))

    compatible = random_compatibility(ALONE, 1, len(KINDS), rng)
    table, evidence = (
        type(part)(**{one.name: arranged(getattr(part, one.name)) for one in fields(part)})
        for part in (lived(DEFAULT, compatible, rng), random_evidence(ALONE, 1, rng))
    )
    price = rng.integers(1, 100, compatible.shape) * compatible
    cost = Cost(arranged(price), arranged(rng.integers(0, 10, (ALONE, 1, len(Blend)))))
    widths, layouts = rng.integers(1, 99, (ALONE, 1)), rng.choice([layout.value for layout in Layout], (ALONE, 1))
    offered = Offered(KINDS, Costs(cost, cost, cost), arranged(compatible), arranged(widths), networks())
    host = (1000 + 1000 * networks()).astype(np.int64)
    held = Held(offered, table, evidence, host, networks(), arranged(layouts))
    past = History(*table.stage.shape, len(KINDS), math.log(10), 0.1)
    health = HealthTable.none(*table.stage.shape)
    past.training = TrainingReport(networks(), networks(), networks(), np.abs(slots()), health)
    past.accuracy_contribution, past.loss_contribution_before = slots(), slots()
    past.loss_contribution = np.where(table.owning, slots(), np.nan)
    past.tries, past.outcomes = np.abs(slots(len(KINDS))), slots(len(KINDS))
    return FeatureInputs(held, past, networks(), 30, networks(), networks(), networks())


def seen(arranged: Arrange) -> Observation:
    return observe(view(arranged))


def test_features_are_those_of_every_slot_by_itself() -> None:
    many, single = seen(side_by_side), seen(alone)
    shape = (ENVIRONMENTS, SLOTS)
    assert many.slots.shape == (*shape, len(SLOT_FEATURES))
    assert many.blueprints.shape == (*shape, len(KINDS), len(BLUEPRINT_FEATURES))
    for index, feature in enumerate(SLOT_FEATURES):
        if feature.name != "depth":
            assert torch.equal(many.slots[..., index], single.slots[..., index].view(shape)), feature.name
    assert torch.equal(many.blueprints, single.blueprints.view(many.blueprints.shape))


def test_depth_rises_evenly_from_the_first_slot_to_the_last() -> None:
    depths = FeatureReader(seen(side_by_side)).slot("depth")
    np.testing.assert_allclose(np.diff(depths), 1 / (SLOTS - 1), rtol=1e-4)
    assert depths[:, [0, -1]].tolist() == [[0, 1]] * ENVIRONMENTS


def test_a_network_has_added_what_its_slots_have() -> None:
    many, single = (FeatureReader(seen(way)).network("log_added_parameters") for way in (side_by_side, alone))
    added = np.expm1(single).reshape(ENVIRONMENTS, SLOTS).sum(1)
    assert (added > 0.1).all()
    np.testing.assert_allclose(np.expm1(many), added, rtol=1e-4)
