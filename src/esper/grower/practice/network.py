"""The host of a run, with slots."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esper.grower.practice.settings import GrowSettings
from esper.growth.attach import attach
from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.lifecycle.actions import Blend
from esper.tasks.data import stream
from esper.tasks.practice.examples import Examples, Splits
from esper.tasks.practice.registry import get_host

HOST, SEEDS, ORDER = range(3)
"""Keys of a run's random streams."""
PROBED = 2
"""Examples that show the host's shapes."""


def growing_host(settings: GrowSettings, splits: Splits) -> GrowingModel:
    """A fresh host with dormant slots."""
    inputs = first_inputs(splits.train)
    build = get_host(settings.host).build
    host = build(tuple(inputs.shape[1:]), splits.classes, _generator(settings.seed, HOST))
    return attach(host.to(settings.device), settings.slots, inputs)


def fill(model: GrowingModel, seed: int, blend: Blend) -> None:
    """Plant in every slot, for good and at full weight, the dearest blueprint that it offers."""
    for place, slot in enumerate(model.slots.values()):
        slot.germinate(_dearest(slot), _generator(seed, SEEDS, place), blend=blend, alpha=1.0)
        slot.fossilize()


def first_inputs(examples: Examples) -> Tensor:
    """Enough of them to show what the host reads."""
    return next(examples.in_order(PROBED)).inputs


def _generator(seed: int, *key: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(stream(seed, *key).integers(np.iinfo(np.int64).max)))


def _dearest(slot: Slot) -> str:
    return max(slot.blueprints, key=lambda name: get(name).parameters_at(slot.site))
