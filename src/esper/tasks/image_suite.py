"""The suite `images`: small convolutional networks on computed, coloured 32 x 32 images of ten classes.

In order: the samplers, the host, with three to five stages, the families and their hidden variants, the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from esper.numerics.arrays import Bools, Float32s, Floats, Ints
from esper.numerics.modules import initialise
from esper.numerics.random_streams import child_generator
from esper.tasks.datasets import digits
from esper.tasks.instance import PARTS, Instance, LabelledArrays, Part, add_label_noise
from esper.tasks.suite import Families, OptimizerSettings, SampledSuite, Variant, VariantSuite

# Samplers. What is fixed for an instance (colours, patterns, angles) is drawn from one generator, the examples from
# another, so all parts of an instance pose the same problem.

SIDE, COLOURS, CLASSES = 32, 3, 10

Sampler = Callable[[int, Part, np.random.Generator, np.random.Generator], LabelledArrays]
"""Maps ``(N, part, fixed, fresh)`` to N examples ``[N, COLOURS, SIDE, SIDE]``."""


def draw_labels(count: int, rng: np.random.Generator) -> Ints:
    """Balanced labels ``[N]`` in random order."""
    return rng.permutation(np.arange(count) % CLASSES)


def draw_colours(count: int, rng: np.random.Generator) -> Float32s:
    """Random unit vectors ``[N, COLOURS]``."""
    colours = rng.standard_normal((count, COLOURS), dtype=np.float32)
    return colours / np.linalg.norm(colours, axis=1, keepdims=True)


def draw_pale_colours(count: int, rng: np.random.Generator) -> Float32s:
    """Bright colours ``[N, COLOURS]`` of random hue."""
    return (1 + 0.5 * draw_colours(count, rng)).astype(np.float32)


def draw_background(count: int, noise: float, rng: np.random.Generator) -> Float32s:
    """White noise ``[N, COLOURS, SIDE, SIDE]`` with standard deviation ``noise``."""
    images = rng.standard_normal((count, COLOURS, SIDE, SIDE), dtype=np.float32)
    images *= np.float32(noise)
    return images


def _pixel_grid() -> tuple[Float32s, Float32s]:
    """Row and column of every pixel, each ``[SIDE, SIDE]``."""
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    return rows, columns


# Textures

ORIENTATIONS = 5
"""Number of orientations of gratings; each is combined with two periods."""


def sample_texture(
    count: int,
    _part: Part,
    fixed: np.random.Generator,
    fresh: np.random.Generator,
    *,
    periods: tuple[float, float],
    noise: float,
    spread: float = 0.0,
) -> LabelledArrays:
    """The class is the orientation and period, in pixels, of a noisy grating with random phase, in one colour.

    Each image is scaled by ``exp(spread * N(0, 1))``: with a large spread, normalising the features pays.
    """
    labels = draw_labels(count, fresh)
    angles = np.pi * (labels % ORIENTATIONS + fixed.random()) / ORIENTATIONS
    frequencies = 1 / np.array(periods)[labels // ORIENTATIONS]
    rows, columns = _pixel_grid()
    across, down = (frequencies * np.cos(angles)).astype(np.float32), (frequencies * np.sin(angles)).astype(np.float32)
    turns = across[:, None, None] * columns + down[:, None, None] * rows
    turns += fresh.random((count, 1, 1), dtype=np.float32)
    waves = np.sin(np.float32(2 * np.pi) * turns)
    images = draw_background(count, noise, fresh)
    images += waves[:, None] * draw_colours(1, fixed)[:, :, None, None] * np.float32(np.sqrt(COLOURS))
    images *= np.exp(np.float32(spread) * fresh.standard_normal((count, 1, 1, 1), dtype=np.float32))
    return LabelledArrays(images, labels)


# Shapes

SHAPES: tuple[Callable[[Floats, Floats], Bools], ...] = (
    lambda x, y: x**2 + y**2 < 1,  # disc
    lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,  # square
    lambda x, y: (abs(x) + abs(y)) < 1.1,  # diamond
    lambda x, y: (y < 0.8) & (y > 1.8 * abs(x) - 0.9),  # triangle
    lambda x, y: abs(np.sqrt(x**2 + y**2) - 0.75) < 0.25,  # ring
    lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.7) < 0.25,  # frame
    lambda x, y: (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),  # upright cross
    lambda x, y: (abs(abs(x) - abs(y)) < 0.4) & (np.maximum(abs(x), abs(y)) < 0.85),  # diagonal cross
    lambda x, y: (abs(y) < 0.35) & (abs(x) < 1.2),  # lying bar
    lambda x, y: (abs(x) < 0.35) & (abs(y) < 1.2),  # standing bar
)
"""For each class, whether points ``(x, y)`` belong to its shape, which fills most of the square from -1 to 1."""
SHAPE_NOISE = 0.4
TILT = 0.25
"""The largest rotation of a shape, in radians."""


def sample_shape(
    count: int, _part: Part, _fixed: np.random.Generator, fresh: np.random.Generator, *, radii: tuple[float, float]
) -> LabelledArrays:
    """The class is the shape of a figure with random colour and place, and a radius in pixels between ``radii``."""
    labels = draw_labels(count, fresh)
    radius = fresh.uniform(*radii, size=(count, 1, 1))
    # The whole figure lies inside the image, slightly rotated.
    rows, columns = _pixel_grid()
    centre_x, centre_y = radius + (SIDE - 1 - 2 * radius) * fresh.random((2, count, 1, 1))
    tilt = fresh.uniform(-TILT, TILT, size=(count, 1, 1))
    right, down = (columns - centre_x) / radius, (rows - centre_y) / radius
    x, y = np.cos(tilt) * right + np.sin(tilt) * down, np.cos(tilt) * down - np.sin(tilt) * right
    inside = np.zeros((count, SIDE, SIDE), np.float32)
    for label, contains in enumerate(SHAPES):
        chosen = labels == label
        inside[chosen] = contains(x[chosen], y[chosen])
    images = draw_background(count, SHAPE_NOISE, fresh)
    images += inside[:, None] * draw_pale_colours(count, fresh)[:, :, None, None]
    return LabelledArrays(images, labels)


# Patterns at random places

PATTERN = 6
"""Side of a pattern, in pixels."""


def _add_at(images: Float32s, patches: Float32s, rows: Ints, columns: Ints) -> None:
    """Add patches ``[N, C, h, w]`` to images ``[N, C, H, W]``; ``rows, columns`` ``[N]`` are their top left corners."""
    height, width = patches.shape[-2:]
    down = rows[:, None] + np.arange(height, dtype=np.int64)
    right = columns[:, None] + np.arange(width, dtype=np.int64)
    examples = np.arange(len(images))[:, None, None]
    images.transpose(0, 2, 3, 1)[examples, down[:, :, None], right[:, None, :]] += patches.transpose(0, 2, 3, 1)


def sample_motif(
    count: int, _part: Part, fixed: np.random.Generator, fresh: np.random.Generator, *, copies: int
) -> LabelledArrays:
    """The class is that of a small pattern, of which ``copies`` are added to noise at random places."""
    patterns = fixed.choice(np.array([-1, 1], np.float32), size=(CLASSES, COLOURS, PATTERN, PATTERN))
    labels = draw_labels(count, fresh)
    images = draw_background(count, 0.5, fresh)
    for _ in range(copies):
        rows, columns = fresh.integers(SIDE - PATTERN + 1, size=(2, count))
        _add_at(images, patterns[labels], rows, columns)
    return LabelledArrays(images, labels)


# Colours

HUE_STRENGTH, HUE_NOISE = 0.35, 1.0


def sample_hue(count: int, _part: Part, fixed: np.random.Generator, fresh: np.random.Generator) -> LabelledArrays:
    """The class is the hue of the whole noisy image: the mean over pixels shows it, so hardly any growth pays."""
    labels = draw_labels(count, fresh)
    angles = 2 * np.pi * (labels + fixed.random()) / CLASSES
    # Hues lie on a circle in the plane of colours whose sum is zero.
    plane = np.array([[1, -1, 0], [1, 1, -2]]) / np.sqrt([[2], [6]])
    hues = (np.stack([np.cos(angles), np.sin(angles)], axis=1) @ plane).astype(np.float32)
    images = draw_background(count, HUE_NOISE, fresh)
    images += np.float32(HUE_STRENGTH) * hues[:, :, None, None]
    return LabelledArrays(images, labels)


# Problems for transfer


def sample_dots(
    count: int, _part: Part, _fixed: np.random.Generator, fresh: np.random.Generator, *, size: int
) -> LabelledArrays:
    """The class is the number, one to ten, of bright squares with sides of ``size`` pixels, which may overlap."""
    labels = draw_labels(count, fresh)
    images = draw_background(count, 0.4, fresh)
    square = np.ones((COLOURS, size, size), np.float32)
    for dot in range(CLASSES):
        rows, columns = fresh.integers(SIDE - size + 1, size=(2, count))
        shown = (dot <= labels).astype(np.float32)
        _add_at(images, shown[:, None, None, None] * square, rows, columns)
    return LabelledArrays(images, labels)


def sample_glyph(
    count: int, part: Part, fixed: np.random.Generator, fresh: np.random.Generator, *, scale: int
) -> LabelledArrays:
    """The class is that of a handwritten digit of scikit-learn, enlarged, with random colour and place."""
    data = digits()
    # Parts share no digits.
    rows = fixed.permutation(len(data.labels))[PARTS.index(part) :: len(PARTS)]
    labels = draw_labels(count, fresh)
    chosen = np.empty(count, np.int64)
    for label in range(CLASSES):
        those = rows[data.labels[rows] == label]
        chosen[labels == label] = those[fresh.integers(len(those), size=int((labels == label).sum()))]
    glyphs = data.inputs[chosen].reshape(count, 1, 8, 8).repeat(scale, axis=2).repeat(scale, axis=3) / np.float32(16)
    glyphs = glyphs.astype(np.float32) * draw_pale_colours(count, fresh)[:, :, None, None]
    images = draw_background(count, 0.3, fresh)
    top, left = fresh.integers(SIDE - 8 * scale + 1, size=(2, count))
    _add_at(images, glyphs, top, left)
    return LabelledArrays(images, labels)


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

    Without inner channels it is the identity. Padding does not change what it computes: an inner channel with zero
    weights contributes nothing and gets no gradient.
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

    ``patches`` and ``halving`` cut the image into patches of 4 x 4 and then 2 x 2 pixels; ``fusion`` mixes channels.
    The residual stages ``early``, at 8 x 8, and ``late``, at 4 x 4, exist if ``stages`` names them; without them, no
    position depends on anything outside its patch. The sites are after ``early``, ``late`` and ``fusion``.
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

# With this noise a host alone reaches an accuracy of about 0.75; with noise 2 it reached 0.99 without growth.
_fine = partial(sample_texture, periods=(3.0, 4.5), noise=2.4)
_coarse = partial(sample_texture, periods=(7.0, 11.0), noise=2.5)
_loud = partial(sample_texture, periods=(3.0, 4.5), noise=1.5, spread=1.5)
_even = partial(sample_texture, periods=(3.0, 4.5), noise=2.4, spread=0.2)
_clear = partial(sample_texture, periods=(3.0, 4.5), noise=1.0)
_large_shape = partial(sample_shape, radii=(9.0, 13.0))
_small_shape = partial(sample_shape, radii=(6.5, 9.5))
_motif = partial(sample_motif, copies=10)

TRAINING: Families = {
    "texture": {"fine": Variant(_fine), "coarse": Variant(_coarse), "coarse_5_stages": Variant(_coarse, host=FIVE)},
    "shape": {
        "large_3_stages": Variant(_large_shape),
        "large_5_stages": Variant(_large_shape, host=FIVE),
        "small_4_stages": Variant(_small_shape, host=FOUR),
    },
    "motif": {"3_stages": Variant(_motif), "5_stages": Variant(_motif, host=FIVE)},
    "bright": {"loud": Variant(_loud, host=("late",)), "even": Variant(_even, host=("late",))},
    "plain": {"hue": Variant(sample_hue), "noisy": Variant(_clear, train_sizes=(128,), label_noise=0.4)},
    "drift": {
        "to_shape": Variant(sample_hue, after_drift=_large_shape),
        "to_texture": Variant(sample_hue, after_drift=partial(_clear, noise=1.7)),
    },
}

TRANSFER: Families = {
    "dots": {
        "small": Variant(partial(sample_dots, size=2)),
        "large": Variant(partial(sample_dots, size=4), host=FOUR),
    },
    "glyph": {
        "3_stages": Variant(partial(sample_glyph, scale=4)),
        "5_stages": Variant(partial(sample_glyph, scale=3), host=FIVE),
    },
}


# The suite

_FIXED = len(PARTS)
"""Key of an instance's random stream for what is fixed; the parts have the keys below it."""


class ImageSuite(SampledSuite, VariantSuite):
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
    optimizer = OptimizerSettings()
    kind = "image family"
    table = {**TRAINING, **TRANSFER}
    widths = FULL
    train_sizes = (256, 384, 512)
    rent = 0.08
    learning_rates = (0.003, 0.008)
    drift_steps = range(6, 11)
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)

    def template(self) -> ImageHost:
        return ImageHost(COLOURS, FULL, CLASSES, FIVE, torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> ImageHost:
        self.check(instance)
        stages: Stages = self.find_variant(instance.family, instance.variant).host or THREE
        return ImageHost(COLOURS, instance.widths, CLASSES, stages, torch.Generator().manual_seed(instance.seed))

    def sample_part(self, instance: Instance, part: Part, phase: int) -> LabelledArrays:
        sampler: Sampler = self.find_sampler(instance, phase)
        fixed, fresh = (child_generator(instance.seed, phase, key) for key in (_FIXED, PARTS.index(part)))
        inputs, labels = sampler(self.count_examples(instance, part), part, fixed, fresh)
        if part == "train" and instance.label_noise:
            labels = add_label_noise(labels, instance.label_noise, CLASSES, fresh)
        return LabelledArrays(inputs, labels)
