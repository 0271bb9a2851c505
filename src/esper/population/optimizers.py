"""Row-wise optimizers: every row of a `FlatParameters` has its own learning rate and step count.

Each gives the same result as its namesake in `torch.optim` applied to the row's module alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.population.parameters import FlatParameters
from esper.tasks.suite import OptimizerSettings

ADAM_EPSILON = 1e-8
CLIP_EPSILON = 1e-6

MOMENT_NAMES: dict[str, tuple[str, ...]] = {"adamw": ("mean", "square"), "sgd": ("velocity",)}
"""Names of the optimizer state of each row, by optimizer."""


@torch.no_grad()
def optimizer_step(flat: FlatParameters, gradient: Tensor, learning: Tensor, settings: OptimizerSettings) -> None:
    """Take one step in place on the rows ``learning``, bool ``[R]``; other rows keep their values and step counts.

    The gradient ``[V]`` must be zero in rows that are not learning.
    """
    step = _step_adamw if settings.name == "adamw" else _step_sgd
    step(flat, gradient, learning.to(flat.steps), settings)


def _step_adamw(flat: FlatParameters, gradient: Tensor, learning: Tensor, settings: OptimizerSettings) -> None:
    """AdamW, Loshchilov and Hutter 2019, with the bias correction of Kingma and Ba 2015, algorithm 1.

    As they remark, a step ``rate * (mean / c1) / (sqrt(square / c2) + epsilon)`` costs less as
    ``(rate * sqrt(c2) / c1) * mean / (sqrt(square) + epsilon * sqrt(c2))``, whose factors are of rows, not of values.
    """
    # Bias corrections by row: seeds are younger than their hosts.
    beta1, beta2 = settings.betas
    flat.steps.add_(learning)
    steps = flat.steps.clamp(min=1)
    rate = flat.learning_rates * learning
    root = (1 - beta2**steps).sqrt()
    # All rows at once: those that do not learn have a rate of zero.
    mean, square = flat.moments["mean"], flat.moments["square"]
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    # Decoupled weight decay, then the step.
    if settings.weight_decay:
        flat.values.mul_(flat.expand_rows(1 - rate * settings.weight_decay))
    denominator = square.sqrt().add_(flat.expand_rows(ADAM_EPSILON * root))
    factor = flat.expand_rows(rate * root / (1 - beta1**steps))
    flat.values.addcdiv_(factor.mul_(mean), denominator, value=-1)


def _step_sgd(flat: FlatParameters, gradient: Tensor, learning: Tensor, settings: OptimizerSettings) -> None:
    """SGD with momentum as `torch.optim.SGD`: the velocity starts as the first gradient, without dampening."""
    flat.steps.add_(learning)
    if settings.weight_decay:
        gradient = torch.addcmul(gradient, flat.expand_rows(settings.weight_decay * learning), flat.values)
    velocity = flat.moments["velocity"]
    velocity.mul_(settings.momentum).add_(gradient)
    flat.values.addcmul_(flat.expand_rows(flat.learning_rates * learning), velocity, value=-1)


@torch.no_grad()
def clip_by_network(flat: FlatParameters, gradient: Tensor, clip_norm: float) -> Tensor:
    """The gradient ``[V]``, scaled so that no network's total norm exceeds ``clip_norm``.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: ``min(1, clip_norm / (norm + 1e-6))``.
    """
    owners = flat.owners.to(gradient.device, non_blocking=True)
    norms = flat.sum_by_network(gradient.square()).sqrt()
    factors = (clip_norm / (norms + CLIP_EPSILON)).clamp(max=1)
    return gradient * flat.expand_rows(factors[owners])
