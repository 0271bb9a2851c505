"""The suite `images`: small convolutional networks on computed 32 x 32 images.

In order: the host, with three to five stages, the families and their hidden variants, the suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import nn

from esper.numerics.modules import initialise
from esper.numerics.random_streams import child_generator
from esper.tasks.image_problems import (
    CLASSES,
    COLOURS,
    SIDE,
    Sampler,
    sample_dots,
    sample_glyph,
    sample_hue,
    sample_motif,
    sample_shape,
    sample_texture,
)
from esper.tasks.instance import PARTS, Data, Instance, LabelledArrays, Part, Scale, add_label_noise, standardise
from esper.tasks.suite import OptimizerSettings
from esper.tasks.variants import Families, VariantSuite

# The host


def make_convolution(
    inputs: int, outputs: int, kernel: int, generator: torch.Generator, *, stride: int = 1
) -> nn.Conv2d:
    """A convolution on images ``[B, C, H, W]``, padded by half its kernel unless it cuts the image into patches."""
    padding = 0 if stride == kernel else kernel // 2
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, device="meta")
    initialise(layer, generator)
    return layer


class ResidualStage(nn.Module):
    """``h + W relu(V * h + b)``, where ``V`` is a 3 x 3 convolution to ``inner`` channels; ``W = 0`` at first.

    Without inner channels the stage is the identity and has no parameters. Padding it to the shapes of a wider stage
    does not change what it computes: an inner channel with zero weights contributes nothing and gets no gradient.
    """

    def __init__(self, width: int, inner: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = inner
        # Torch warns about layers without channels, so the layer is built with at least one.
        self.spread = nn.Conv2d(width, max(inner, 1), 3, padding=1, device="meta")
        self.spread.weight = nn.Parameter(self.spread.weight[:inner])
        initialise(self.spread, generator)
        # As in Fixup (Zhang et al., 2019, arXiv:1901.09321): without normalisation, a branch starts at zero.
        self.merge = nn.Conv2d(max(inner, 1), width, 1, bias=False, device="meta")
        self.merge.weight = nn.Parameter(torch.zeros(width, inner, 1, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not self.inner:
            return features
        return features + self.merge(self.spread(features).relu())


class ImageHost(nn.Module):
    """Three to five stages and a mean over pixels: images ``[B, C, 32, 32]`` to logits ``[B, classes]``.

    ``patches`` and ``halving`` cut the image into patches with sides of 4 and then 2 pixels; ``fusion`` mixes channels.
    The stages ``early``, at 8 x 8, and ``late``, at 4 x 4, are residual and exist only if ``stages`` names them.
    Without them, no position depends on anything outside its patch. The sites are after ``early``, ``late`` and
    ``fusion``.
    """

    def __init__(
        self, colours: int, widths: Sequence[int], classes: int, stages: Stages, generator: torch.Generator
    ) -> None:
        super().__init__()
        first, second, third = widths
        self.patches = nn.Sequential(make_convolution(colours, first, 4, generator, stride=4), nn.ReLU())
        self.early = ResidualStage(first, first // 2 if "early" in stages else 0, generator)
        self.halving = nn.Sequential(make_convolution(first, second, 2, generator, stride=2), nn.ReLU())
        self.late = ResidualStage(second, second // 2 if "late" in stages else 0, generator)
        self.fusion = nn.Sequential(make_convolution(second, third, 1, generator), nn.ReLU())
        self.head = nn.Linear(third, classes, device="meta")
        initialise(self.head, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.late(self.halving(self.early(self.patches(inputs))))
        return self.head(self.fusion(features).mean((-2, -1)))


SITES = ("early", "late", "fusion")
BLUEPRINTS = ("norm", "conv1x1", "depthwise", "conv3x3", "bottleneck", "gate")

Stages = tuple[str, ...]
"""The residual stages of a host, in addition to the three that every host has."""
THREE, FOUR, FIVE = (), ("early",), ("early", "late")
STAGES: Mapping[str, Stages] = {"3_stages": THREE, "4_stages": FOUR, "5_stages": FIVE}
"""Residual stages by the name of the variant."""


# Families and their hidden variants

FULL = (24, 48, 64)
TRAIN_SIZES = (256, 384, 512)


@dataclass(frozen=True)
class Variant:
    """A hidden setting of a family."""

    sampler: Sampler
    stages: Stages = THREE
    widths: tuple[int, int, int] = FULL
    train_sizes: tuple[int, ...] = TRAIN_SIZES
    label_noise: float = 0.0
    after_drift: Sampler | None = None
    """Replaces ``sampler`` at the instance's drift step."""


Family = Mapping[str, Variant]

# With this noise a host alone reaches an accuracy of about 0.75; with noise 2 it reached 0.99 without growth.
_fine = partial(sample_texture, periods=(3.0, 4.5), noise=2.4)
_coarse = partial(sample_texture, periods=(7.0, 11.0), noise=2.5)
_loud = partial(sample_texture, periods=(3.0, 4.5), noise=1.5, spread=1.5)
_even = partial(sample_texture, periods=(3.0, 4.5), noise=2.4, spread=0.2)
_clear = partial(sample_texture, periods=(3.0, 4.5), noise=1.0)
_large_shape = partial(sample_shape, radii=(9.0, 13.0))
_small_shape = partial(sample_shape, radii=(6.5, 9.5))
_motif = partial(sample_motif, copies=10)

TRAINING: Mapping[str, Family] = {
    "texture": {
        "fine": Variant(_fine),
        "coarse": Variant(_coarse),
        "coarse_5_stages": Variant(_coarse, stages=FIVE),
    },
    "shape": {
        "large_3_stages": Variant(_large_shape),
        "large_5_stages": Variant(_large_shape, stages=FIVE),
        "small_4_stages": Variant(_small_shape, stages=FOUR),
    },
    "motif": {
        "3_stages": Variant(_motif),
        "5_stages": Variant(_motif, stages=FIVE),
    },
    "bright": {
        "loud": Variant(_loud, stages=("late",)),
        "even": Variant(_even, stages=("late",)),
    },
    "plain": {
        "hue": Variant(sample_hue),
        "noisy": Variant(_clear, train_sizes=(128,), label_noise=0.4),
    },
    "drift": {
        "to_shape": Variant(sample_hue, after_drift=_large_shape),
        "to_texture": Variant(sample_hue, after_drift=partial(_clear, noise=1.7)),
    },
}

TRANSFER: Mapping[str, Family] = {
    "dots": {
        "small": Variant(partial(sample_dots, size=2)),
        "large": Variant(partial(sample_dots, size=4), stages=FOUR),
    },
    "glyph": {
        "3_stages": Variant(partial(sample_glyph, scale=4)),
        "5_stages": Variant(partial(sample_glyph, scale=3), stages=FIVE),
    },
}


# The suite

RENT = 0.08
LEARNING_RATES = (0.003, 0.008)
DRIFT_STEPS = range(6, 11)

FAMILIES = Families("image family", {**TRAINING, **TRANSFER}, RENT, LEARNING_RATES, DRIFT_STEPS)
_FIXED = len(PARTS)
"""Key of an instance's random stream for what is fixed; the parts have the keys below it."""


class ImageSuite(VariantSuite):
    """Coloured images of 32 x 32 pixels and ten classes, one host architecture for every family."""

    name = "images"
    classes = CLASSES
    input_shape = (COLOURS, SIDE, SIDE)
    sites = SITES
    blueprints = BLUEPRINTS
    steps = 20
    batches_per_step = 8
    batch_size = 16
    validation_size = 128
    test_size = 384
    optimizer = OptimizerSettings(name="adamw", betas=(0.9, 0.98), weight_decay=0.0)
    table = FAMILIES
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)

    def template(self) -> ImageHost:
        return ImageHost(COLOURS, FULL, CLASSES, FIVE, torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> ImageHost:
        self.check(instance)
        stages = FAMILIES.find(instance.family, instance.variant).stages
        return ImageHost(COLOURS, instance.widths, CLASSES, stages, torch.Generator().manual_seed(instance.seed))

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Inputs ``[N, COLOURS, SIDE, SIDE]``, standardised by the training part of the same phase, and labels."""
        self.check(instance)
        sizes = {"train": instance.train_size, "validation": self.validation_size, "test": self.test_size}
        return standardise(*_sample_part(instance, part, phase, sizes[part]), _measure_scale(instance, phase))


@lru_cache(maxsize=1024)
def _measure_scale(instance: Instance, phase: int) -> Scale:
    """The scale of the training part, by which all parts are standardised; only the scale is cached, not the images."""
    return Scale.of(_sample_part(instance, "train", phase, instance.train_size).inputs)


def _sample_part(instance: Instance, part: Part, phase: int, count: int) -> LabelledArrays:
    sampler: Sampler = FAMILIES.find_sampler(instance, phase)
    fresh = child_generator(instance.seed, phase, PARTS.index(part))
    examples = sampler(count, part, child_generator(instance.seed, phase, _FIXED), fresh)
    if part == "train" and instance.label_noise:
        return LabelledArrays(examples.inputs, add_label_noise(examples.labels, instance.label_noise, CLASSES, fresh))
    return examples
