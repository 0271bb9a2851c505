"""What training a network costs in floating-point operations; measurements of it are not counted, for anybody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from esper.experiments.arms.occupancy import Occupancy
from esper.growth import blending
from esper.growth.blueprints.registry import get
from esper.lifecycle.actions import Blend
from esper.lifecycle.stages import BLENDED, Stage, membership
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite
from esper.training.budget import Cost
from esper.training.execution import Execution
from esper.training.population import Fossils

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TRAINING_PASSES = 3
"""FLOPs of a training step over those of its forward pass.

A backward pass costs about two forward ones: for every product of weights and features, one for the gradient of either
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Hobbhahn and Sevilla 2021, "What's the backward-forward FLOP ratio
for neural networks?", Epoch AI).
"""

_BLENDED = membership(BLENDED)


class Prices:
    """FLOPs of one forward pass for one example of a suite's hosts and seeds; a multiply-add counts two."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._sites = Execution(suite.template(), suite.sites, torch.zeros(2, *suite.input_shape)).sites
        self._known: dict[tuple[int, ...], tuple[int, Cost]] = {}

    def host(self, instance: Instance) -> int:
        """Of the instance's host."""
        return self._priced(instance)[0]

    def seeds(self, instance: Instance) -> Cost:
        """Of seeds in the host's slots, for E = 1."""
        return self._priced(instance)[1]

    def network(self, instance: Instance, fossils: Fossils) -> int:
        """Of the host with fossils."""
        seeds = self.seeds(instance)
        of_fossils = [
            seeds.blueprints[0, one.slot, one.blueprint] + seeds.blends[0, one.slot, one.blend] for one in fossils
        ]
        return self.host(instance) + int(sum(of_fossils))

    def _priced(self, instance: Instance) -> tuple[int, Cost]:
        """Hosts of equal widths cost the same, and counting takes milliseconds."""
        widths = instance.widths
        if widths not in self._known:
            sites = [site.narrowed(width) for site, width in zip(self._sites, widths, strict=True)]
            kinds = [get(name) for name in self._suite.blueprints]
            seeds = [[kind.flops_at(site) if kind.serves(site) else 0 for kind in kinds] for site in sites]
            blends = [[blending.flops_at(blend, site) for blend in Blend] for site in sites]
            self._known[widths] = self._suite.flops(instance), Cost(np.array([seeds]), np.array([blends]))
        return self._known[widths]


def examples_per_decision(suite: Suite) -> int:
    """Examples that a network is trained on after each decision."""
    return suite.batches_per_step * suite.batch_size


def training_flops(
    suite: Suite, prices: Prices, instances: Sequence[Instance], slots: Occupancy, running: Bools
) -> Ints:
    """FLOPs of each network's training after each decision, ``[T, E]``; 0 where it is not ``running``, bool ``[T, E]``.

    Host and seeds that count in the forward pass. Seeds that train in isolation take a second pass, of the whole
    network with them in it.
    """
    host = np.array([prices.host(instance) for instance in instances])
    cost = Cost.concatenate([prices.seeds(instance) for instance in instances]).of(slots.blueprint, slots.blend)
    whole = host + (cost * _BLENDED[slots.stage]).sum(-1)
    isolated = slots.stage == Stage.TRAINING
    second = np.where(isolated.any(-1), whole + (cost * isolated).sum(-1), 0)
    return TRAINING_PASSES * examples_per_decision(suite) * (whole + second) * running
