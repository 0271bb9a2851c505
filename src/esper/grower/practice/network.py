"""The host of a run, with slots."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from esper.grower.practice.settings import ALL_FROM_START, GrowSettings
from esper.growth.attach import attach
from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.tasks.practice.examples import Examples, Splits
from esper.tasks.practice.registry import get_host
from esper.tasks.streams import stream

HOST, SEEDS, ORDER = range(3)
"""Keys of a run's random streams."""
PROBED = 2
"""Examples that show the host's shapes."""


def generator(seed: int, *key: int) -> torch.Generator:
    """Torch's generator for one of the run's random streams."""
    return torch.Generator().manual_seed(int(stream(seed, *key).integers(np.iinfo(np.int64).max)))


def growing_host(settings: GrowSettings, splits: Splits) -> GrowingModel:
    """A fresh host with dormant slots; under `ALL_FROM_START` they are all filled for good."""
    inputs = example(splits.train)
    kind = get_host(settings.host)
    host = kind.build(tuple(inputs.shape[1:]), splits.classes, generator(settings.seed, HOST))
    model = attach(host.to(settings.device), settings.slots, inputs)
    if settings.controller == ALL_FROM_START:
        for place, slot in enumerate(model.slots.values()):
            slot.germinate(_dearest(slot), generator(settings.seed, SEEDS, place), alpha=1.0)
            slot.fossilize()
    return model


def example(examples: Examples) -> Tensor:
    """The first inputs."""
    return next(examples.in_order(PROBED)).inputs


def _dearest(slot: Slot) -> str:
    return max(slot.blueprints, key=lambda name: get(name).parameters_at(slot.site))
