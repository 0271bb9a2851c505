"""The default suite: small token problems on which different seeds pay, in different slots.

Top to bottom: the host, which cannot mix tokens; the families' hidden variants; the suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import nn

from esper.errors import TaskError
from esper.numerics.random_streams import child_generator
from esper.numerics.stacking import Stackable
from esper.tasks.data import PARTS, Data, LabelledArrays, Part, Scale, add_label_noise, standardise
from esper.tasks.instance import Instance
from esper.tasks.layers import Linear, TokenLinear
from esper.tasks.registry import lookup
from esper.tasks.suite import OptimizerSettings, Suite, log_uniform
from esper.tasks.token_families import (
    CLASSES,
    FEATURES,
    TOKENS,
    Sampler,
    context,
    halves,
    largest_mean,
    largest_power,
    order,
    pointer,
    product,
    random_directions,
    vote,
)


class TokenLayer(nn.Module):
    """``act(W h + b)`` on every token ``[..., B, T, C]``.

    ``act`` multiplies negative values by a slope: 0 for ReLU, 1 for none. The slope is a buffer,
    so that hosts of either kind stack into one program.
    """

    slope: torch.Tensor

    def __init__(self, inputs: int, outputs: int, slope: float, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = TokenLinear(inputs, outputs, generator)
        self.register_buffer("slope", torch.tensor(slope))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.activate(self.linear(features))

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of features ``[..., B, T, outputs]``."""
        if not x.requires_grad:
            return torch.prelu(x.unsqueeze(0), self.slope.reshape(-1)).squeeze(0)  # networks in the place of channels
        # The same as a product with the derivative, a constant: the derivative of prelu would cost ten times as much.
        return x * x.detach().sign().clamp_min_(self.slope[..., None, None, None])


class PositionedTokenLayer(TokenLayer):
    """A token layer with one more learned bias for every position."""

    def __init__(self, inputs: int, outputs: int, slope: float, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, slope, generator)
        self.position = nn.Parameter(torch.zeros(TOKENS, outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.activate(self.linear(features) + self.position.unsqueeze(-3))


def token_mean(features: torch.Tensor) -> torch.Tensor:
    """The mean over an even number T of tokens: features ``[..., B, T, C]`` to ``[..., B, C]``, contiguous."""
    # As `mean` would add them, but along the axis that is innermost in memory, which takes a tenth of its time.
    first, second = features.transpose(-3, -1).chunk(2, dim=-2)
    return ((first + second).sum(dim=-2) / features.shape[-2]).mT.contiguous()


class TokenHost(Stackable):
    """Inputs ``[..., B, TOKENS, FEATURES]`` to logits ``[..., B, CLASSES]``.

    ``layer0`` to ``layer2`` are the growth sites.
    """

    def __init__(self, widths: Sequence[int], *, linear_host: bool, generator: torch.Generator) -> None:
        super().__init__()
        slope = 1.0 if linear_host else 0.0
        first, second, third = widths
        self.layer0 = PositionedTokenLayer(FEATURES, first, slope, generator)
        self.layer1 = TokenLayer(first, second, slope, generator)
        self.layer2 = TokenLayer(second, third, slope, generator)
        self.head = Linear(third, CLASSES, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.layer2(self.layer1(self.layer0(inputs)))
        return self.head(token_mean(features))


FULL = (10, 10, 10)
TRAIN_SIZES = (384, 512, 768)


@dataclass(frozen=True)
class Variant:
    """One hidden setting of a family."""

    sampler: Sampler
    widths: tuple[int, int, int] = FULL
    linear: bool = False
    train_sizes: tuple[int, ...] = TRAIN_SIZES
    label_noise: float = 0.0
    after_drift: Sampler | None = None
    """Takes over from ``sampler`` at the instance's drift step."""


Family = Mapping[str, Variant]

_near_order, _far_order = partial(order, distance=1), partial(order, distance=4)
_near_pointer, _far_pointer = partial(pointer, distance=1), partial(pointer, distance=4)

TRAINING: Mapping[str, Family] = {
    "order": {
        "near_10_10_10": Variant(_near_order),
        "near_10_3_3": Variant(_near_order, widths=(10, 3, 3)),
        "near_3_3_10": Variant(_near_order, widths=(3, 3, 10)),
        "far_10_10_10": Variant(_far_order),
        "far_10_3_3": Variant(_far_order, widths=(10, 3, 3)),
    },
    "ctx": {
        "flipped": Variant(partial(context, flipped=True)),
        "direct": Variant(partial(context, flipped=False)),
    },
    "bott": {
        "2_10_10": Variant(largest_mean, widths=(2, 10, 10)),
        "10_2_10": Variant(largest_mean, widths=(10, 2, 10)),
        "10_10_2": Variant(largest_mean, widths=(10, 10, 2)),
    },
    "quad": {
        "linear": Variant(largest_power, linear=True),
        "relu": Variant(largest_power),
    },
    "vote": {
        "loud": Variant(partial(vote, spread=1.8)),
        "even": Variant(partial(vote, spread=0.2)),
    },
    "plain": {
        "mean": Variant(largest_mean),
        "noisy": Variant(partial(vote, spread=0.2), train_sizes=(96,), label_noise=0.4),
    },
    "drift": {
        "near": Variant(largest_mean, after_drift=_near_order),
        "far": Variant(largest_mean, after_drift=_far_order),
    },
}

TRANSFER: Mapping[str, Family] = {
    "pointer": {
        "near": Variant(_near_pointer),
        "far": Variant(_far_pointer),
    },
    "halves": {
        "10_10_10": Variant(halves),
        "10_3_10": Variant(halves, widths=(10, 3, 10)),
    },
    "product": {
        "linear": Variant(product, linear=True),
        "2_10_10": Variant(product, widths=(2, 10, 10)),
    },
}


RENT = 0.08
LEARNING_RATES = (0.007, 0.015)
DRIFT_STEPS = range(9, 15)

_FAMILIES = {**TRAINING, **TRANSFER}
_DIRECTIONS_STREAM = len(PARTS)
_CACHED_PARTS = 128


class TokenSuite(Suite):
    """Eight tokens of five features, four classes, one host architecture for every family."""

    name = "tokens"
    classes = CLASSES
    input_shape = (TOKENS, FEATURES)
    sites = ("layer0", "layer1", "layer2")
    blueprints = ("mlp", "token_conv", "attention", "token_mix", "gate", "norm", "input_skip")
    steps = 30
    batches_per_step = 8
    batch_size = 32
    validation_size = 128
    test_size = 512
    optimizer = OptimizerSettings(name="adamw", betas=(0.9, 0.98), weight_decay=0.0)
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)

    def variants(self, family: str) -> tuple[str, ...]:
        return tuple(lookup("token family", family, _FAMILIES))

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        chosen = _variant(family, variant)
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=chosen.widths,
            learning_rate=log_uniform(*LEARNING_RATES, rng),
            train_size=int(rng.choice(chosen.train_sizes)),
            rent=RENT,
            label_noise=chosen.label_noise,
            drift_step=int(rng.choice(DRIFT_STEPS)) if chosen.after_drift else None,
            linear=chosen.linear,
        )

    def template(self) -> TokenHost:
        return TokenHost(FULL, linear_host=False, generator=torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> TokenHost:
        self.check(instance)
        generator = torch.Generator().manual_seed(instance.seed)
        return TokenHost(instance.widths, linear_host=instance.linear, generator=generator)

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Inputs ``[N, TOKENS, FEATURES]``, standardised by the training part of the same phase, and labels."""
        self.check(instance)
        training = _training_part(instance, phase)
        if part == "train":
            examples = training
        else:
            count = self.validation_size if part == "validation" else self.test_size
            examples = _examples(instance, part, phase, count)
        return standardise(*examples, Scale.of(training.inputs))


def _variant(family: str, variant: str) -> Variant:
    return lookup(f"variant of token family '{family}'", variant, lookup("token family", family, _FAMILIES))


@lru_cache(maxsize=_CACHED_PARTS)
def _training_part(instance: Instance, phase: int) -> LabelledArrays:
    """Kept because every part is standardised by it; callers must not write to it."""
    return _examples(instance, "train", phase, instance.train_size)


def _examples(instance: Instance, part: Part, phase: int, count: int) -> LabelledArrays:
    sampler = _sampler(instance, phase)
    rng = child_generator(instance.seed, phase, PARTS.index(part))
    directions = random_directions(child_generator(instance.seed, phase, _DIRECTIONS_STREAM))
    inputs, labels = sampler(count, directions, rng)
    if part == "train" and instance.label_noise:
        labels = add_label_noise(labels, instance.label_noise, CLASSES, rng)
    return LabelledArrays(inputs, labels)


def _sampler(instance: Instance, phase: int) -> Sampler:
    variant = _variant(instance.family, instance.variant)
    if phase == 0:
        return variant.sampler
    if phase == 1 and variant.after_drift:
        return variant.after_drift
    raise TaskError(f"instance {instance.name} has no phase {phase}: only instances that drift have a phase 1")
