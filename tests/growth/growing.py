"""Seeds and fossils that change the output."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.lifecycle.actions import Blend


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def plant(model: GrowingModel, slot: str, blueprint: str, blend: Blend = Blend.ADD, alpha: float = 0.7) -> Seed:
    """A seed as after much training."""
    seed = model.slots[slot].germinate(blueprint, generator(2), blend=blend, alpha=alpha)
    with torch.no_grad():
        for index, parameter in enumerate(seed.parameters()):
            parameter.add_(random(*parameter.shape, seed=100 + index) / 3)
    return seed


def fossilize(model: GrowingModel, slot: str, blueprint: str, blend: Blend = Blend.ADD) -> Seed:
    seed = plant(model, slot, blueprint, blend)
    model.slots[slot].fossilize()
    return seed
