"""A suite of your own: which problems, which hosts, how they are trained. Nothing else of Esper need know it.

    esper evaluate --controller look --suite examples/own_suite.py:rings --instances 32
    esper train --set suite=examples/own_suite.py:rings

Points of the plane lie on three rings, or, in the family that no controller trains on, on three arms of a spiral; the
host is far too narrow to tell them apart.
"""

import math

import numpy as np
import torch
from torch import nn

from esper.tasks.instance import PARTS, Data, Instance, Part
from esper.tasks.registry import register
from esper.tasks.suite import OptimizerSettings, Suite

WIDTH = 4
TRAIN_SIZE = 256
NOISE = {"clear": 0.05, "blurred": 0.15}
"""Standard deviation of the radius, by variant."""


@register
class Rings(Suite):
    name = "rings"
    classes = 3
    input_shape = (2,)
    sites = ("1", "3")
    blueprints = ("mlp", "gate", "norm", "input_skip")
    steps = 20
    batches_per_step = 8
    batch_size = 32
    validation_size = 128
    test_size = 512
    optimizer = OptimizerSettings(name="adamw")
    families = ("rings",)
    transfer_families = ("spiral",)

    def variants(self, family: str) -> tuple[str, ...]:
        return tuple(NOISE)

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=(WIDTH, WIDTH),  # live channels at each site
            learning_rate=math.exp(rng.uniform(math.log(0.003), math.log(0.03))),
            train_size=TRAIN_SIZE,
            rent=float(rng.choice([0.02, 0.05])),
        )

    def template(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, self.classes)
        )

    def host(self, instance: Instance) -> nn.Module:
        """Equal instances give equal hosts: all that is random follows from the seed."""
        host, generator = self.template(), torch.Generator().manual_seed(instance.seed)
        for layer in host:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)
        return host

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Inputs ``[N, 2]``; each part is drawn by itself."""
        sizes = {"train": instance.train_size, "validation": self.validation_size, "test": self.test_size}
        rng = np.random.default_rng([instance.seed, PARTS.index(part)])
        labels = rng.integers(self.classes, size=sizes[part])
        place = rng.random(sizes[part])
        turns = place if instance.family == "rings" else place + labels / self.classes
        radius = labels + 1 if instance.family == "rings" else 3 * place
        radius = radius + NOISE[instance.variant] * rng.standard_normal(sizes[part])
        points = np.stack([radius * np.cos(2 * np.pi * turns), radius * np.sin(2 * np.pi * turns)], 1)
        return Data(torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels))
