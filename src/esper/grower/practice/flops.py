"""What training a model costs in floating-point operations; measurements of it are not counted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.experiments.static_networks import TRAINING_PASSES
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot


def forward_flops(module: nn.Module, inputs: Tensor) -> int:
    """Of one forward pass for one example, counted by torch; a multiply-add counts two."""
    was_training = module.training
    module.eval()
    # Fused attention is opaque to the counter on some devices; the plain formula shows its products.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(inputs)
    module.train(was_training)
    return counter.get_total_flops() // len(inputs)


def seed_flops(model: GrowingModel) -> int:
    """Of one forward pass for one example through all seeds that are there, as blueprints count them."""
    return sum(_flops(slot) for slot in model.slots.values())


def fork_flops(model: GrowingModel, forks: Iterable[str], whole: int) -> int:
    """Of one forward pass for one example through all ``forks``, named by the slots whose seed each does without.

    ``whole`` is what a pass through the model costs with all its seeds.
    """
    return sum(whole - _flops(model.slots[name]) for name in forks)


def training_flops(forward: int, examples: int) -> int:
    """Of learning from ``examples``, each of which costs ``forward`` in a forward pass."""
    return TRAINING_PASSES * examples * forward


def _flops(slot: Slot) -> int:
    return 0 if slot.seed is None else slot.seed.flops_at(slot.site)
