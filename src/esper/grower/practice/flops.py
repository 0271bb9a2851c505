"""What training a model costs in floating-point operations; measurements of it are not counted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.experiments.arms.flops import TRAINING_PASSES
from esper.growth.model import GrowingModel


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
    return sum(slot.seed.flops_at(slot.site) for slot in model.slots.values() if slot.seed is not None)


def training_flops(forward: int, examples: int) -> int:
    """Of learning from ``examples``, each of which costs ``forward`` in a forward pass."""
    return TRAINING_PASSES * examples * forward
