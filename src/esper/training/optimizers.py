"""Row-wise optimizers: every row of a `RowBlock` has its own learning rate and step count.

Each equals its `torch.optim` namesake applied to the row's module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper.tasks.optimizer import OptimizerSettings
from esper.training.rows import RowBlock

ADAM_EPSILON = 1e-8
CLIP_EPSILON = 1e-6

MOMENT_NAMES: dict[str, tuple[str, ...]] = {"adamw": ("mean", "square"), "sgd": ("velocity",)}
"""The optimizer state that each row carries."""


def optimizer_step(block: RowBlock, gradient: Tensor, started: Tensor, settings: OptimizerSettings) -> None:
    """One step in place on the rows that have ``started`` to learn, bool ``[R]``.

    Rows that have not started must have a zero gradient (``gradient`` is ``[R, P]``); they keep their values and their
    step count of 0.
    """
    _STEPS[settings.name](block, gradient, started.to(block.steps), settings)


@torch.no_grad()
def _adamw(block: RowBlock, gradient: Tensor, started: Tensor, settings: OptimizerSettings) -> None:
    """AdamW, Loshchilov and Hutter 2019, with the bias correction of Kingma and Ba 2015, algorithm 1."""
    beta1, beta2 = settings.betas
    block.steps.add_(started)
    rate = (block.learning_rates * started).unsqueeze(1)
    steps = block.steps.clamp(min=1).unsqueeze(1)
    mean, square = block.moments["mean"], block.moments["square"]
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = square.sqrt().mul_((1 - beta2**steps).rsqrt()).add_(ADAM_EPSILON)
    values = block.values.detach()
    if settings.weight_decay:
        values.mul_(1 - rate * settings.weight_decay)
    values.sub_((mean / denominator).mul_(rate / (1 - beta1**steps)))


@torch.no_grad()
def _sgd(block: RowBlock, gradient: Tensor, started: Tensor, settings: OptimizerSettings) -> None:
    """SGD with momentum as `torch.optim.SGD`: the velocity starts as the first gradient, without dampening."""
    block.steps.add_(started)
    values = block.values.detach()
    if settings.weight_decay:
        gradient = gradient + settings.weight_decay * started.unsqueeze(1) * values
    velocity = block.moments["velocity"]
    velocity.mul_(settings.momentum).add_(gradient)
    values.sub_(velocity * block.learning_rates.unsqueeze(1))


_STEPS: dict[str, Callable[[RowBlock, Tensor, Tensor, OptimizerSettings], None]] = {"adamw": _adamw, "sgd": _sgd}


@torch.no_grad()
def clip_by_network(
    blocks: Sequence[RowBlock], gradients: Sequence[Tensor], networks: int, clip_norm: float
) -> list[Tensor]:
    """The gradients ``[R, P]`` of all blocks, scaled so that no network's total norm exceeds ``clip_norm``.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: ``min(1, clip_norm / (norm + 1e-6))``.
    """
    squares = gradients[0].new_zeros(networks)
    owners = [block.owners.to(squares.device) for block in blocks]
    for gradient, owner in zip(gradients, owners, strict=True):
        squares.index_add_(0, owner, gradient.square().sum(1))
    factors = (clip_norm / (squares.sqrt() + CLIP_EPSILON)).clamp(max=1)
    return [gradient * factors[owner].unsqueeze(1) for gradient, owner in zip(gradients, owners, strict=True)]
