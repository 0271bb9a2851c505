"""Digits for hosts of a hundred narrow layers, with a slot behind each, half of which hold a fossil from the start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from esper.numerics.stacking import Stackable
from esper.population.parameters import SeedKind
from esper.rl.episodes import Episodes
from esper.tasks.datasets import DigitsSuite
from esper.tasks.layers import Linear
from rl.short import QUICK

SLOTS, SEEDS = 100, 50
WIDTH = 4
NETWORKS = 2


class DeepHost(Stackable):
    """Inputs ``[..., B, D]`` through layers without skips to logits ``[..., B, classes]``.

    Linear and orthogonal, so that neither what the first seeds do nor their gradient is lost on the way.
    """

    def __init__(self, features: int, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        layers = [Linear(*sizes, generator) for sizes in pairwise((features, *widths))]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, generator=generator)
        self.layers = nn.Sequential(*layers)
        self.head = Linear(widths[-1], classes, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs))


class DeepSuite(DigitsSuite):
    steps = 5
    batches_per_step = 1
    batch_size = 8
    validation_size = 16
    sites = tuple(f"layers.{slot}" for slot in range(SLOTS))
    host_widths = ((WIDTH,) * SLOTS,)

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> DeepHost:
        return DeepHost(self.input_shape[0], widths, self.classes, generator)


SUITE = DeepSuite()


def episodes() -> Episodes:
    """Every network has its fossils in slots of its own, of all kinds."""
    rng = np.random.default_rng(2)
    chosen = [rng.permutation(SLOTS)[:SEEDS].tolist() for _ in range(NETWORKS)]
    fossils = [tuple(SeedKind(slot, slot % len(SUITE.blueprints)) for slot in slots) for slots in chosen]
    return Episodes(SUITE, SUITE.sample(NETWORKS, "train", rng), QUICK, fossils=fossils)
