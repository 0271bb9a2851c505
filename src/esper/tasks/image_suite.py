"""The suite `images`: 32 x 32 images of four classes, on which different small modules pay, in different slots.

In order: the samplers, the host, which mixes no positions but by averaging, the families, the suite.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from esper.numerics.arrays import Float32s, Ints
from esper.numerics.modules import Linear, Stackable
from esper.numerics.random_streams import child_generator
from esper.tasks.instance import PARTS, Instance, LabelledArrays, Part, add_label_noise
from esper.tasks.suite import Families, OptimizerSettings, SampledSuite, Variant, VariantSuite
from esper.tasks.token_suite import LINEAR, TokenLayer, average_tokens

SIDE, COLOURS, CLASSES = 32, 3, 4
CELL = 4
"""Side of a cell, in pixels."""
CELLS = SIDE // CELL
"""Cells along each side of an image."""
PIXELS = COLOURS * CELL * CELL
"""Values of a cell."""


# Samplers

Sampler = Callable[[int, Float32s, np.random.Generator], LabelledArrays]
"""Maps ``(N, patterns, rng)`` to the cells of N examples, ``[N, CELLS, CELLS, PIXELS]``. The rows of ``patterns``
``[PIXELS, PIXELS]`` are orthonormal and fixed for the instance; its host has to learn them."""


def draw_patterns(rng: np.random.Generator) -> Float32s:
    """A random orthonormal basis of the values of a cell, one pattern per row ``[PIXELS, PIXELS]``."""
    basis, _ = np.linalg.qr(rng.standard_normal((PIXELS, PIXELS)))
    return basis.astype(np.float32)


def draw_noise(count: int, rng: np.random.Generator) -> Float32s:
    """Standard normal cells ``[N, CELLS, CELLS, PIXELS]``."""
    return rng.standard_normal((count, CELLS, CELLS, PIXELS), dtype=np.float32)


def draw_labels(count: int, rng: np.random.Generator) -> Ints:
    """Uniform labels ``[N]``."""
    return rng.integers(CLASSES, size=count)


def sample_neighbours(
    count: int,
    patterns: Float32s,
    rng: np.random.Generator,
    *,
    block: int,
    faithful: float,
    amplitude: float,
) -> LabelledArrays:
    """``z = z_left + y (mod 4)`` for most blocks of ``block`` x ``block`` cells, each showing its symbol's pattern.

    Each cell alone is uniform for every label: the host needs a module that mixes cells.
    """
    labels = draw_labels(count, rng)
    side = CELLS // block
    symbols = rng.integers(CLASSES, size=(count, side, side))
    follows = rng.random((count, side, side), dtype=np.float32) < faithful
    for column in range(1, side):
        successor = (symbols[:, :, column - 1] + labels[:, None]) % CLASSES
        symbols[:, :, column] = np.where(follows[:, :, column], successor, symbols[:, :, column])
    symbols = symbols.repeat(block, axis=1).repeat(block, axis=2)
    cells = draw_noise(count, rng)
    cells += np.float32(amplitude) * patterns[symbols]
    return LabelledArrays(cells, labels)


def sample_context(
    count: int, patterns: Float32s, rng: np.random.Generator, *, everywhere: float, amplitude: float
) -> LabelledArrays:
    """``y = b0 + 2 (b1 xor f)``: b0 is shown by all cells, f by the top left quadrant, b1 by the bottom right one."""
    bits = rng.integers(2, size=(3, count))
    b0, b1, f = bits
    signs = (2 * bits - 1).astype(np.float32)[:, :, None, None, None]
    cells = draw_noise(count, rng)
    half = CELLS // 2
    cells += np.float32(everywhere) * signs[0] * patterns[0]
    cells[:, half:, half:] += np.float32(amplitude) * signs[1] * patterns[1]
    cells[:, :half, :half] += np.float32(amplitude) * signs[2] * patterns[2]
    return LabelledArrays(cells, b0 + 2 * (b1 ^ f))


def sample_power(
    count: int, patterns: Float32s, rng: np.random.Generator, *, deviation: float, factor: float
) -> LabelledArrays:
    """Every cell adds four patterns with Gaussian coefficients; those of the label's pattern are larger.

    A linear host needs a nonlinear function of single cells.
    """
    labels = draw_labels(count, rng)
    deviations = np.where(np.arange(CLASSES) == labels[:, None], deviation * factor, deviation).astype(np.float32)
    coefficients = rng.standard_normal((count, CELLS, CELLS, CLASSES), dtype=np.float32)
    cells = draw_noise(count, rng)
    cells += (coefficients * deviations[:, None, None]) @ patterns[:CLASSES]
    return LabelledArrays(cells, labels)


def sample_vote(
    count: int,
    patterns: Float32s,
    rng: np.random.Generator,
    *,
    shown: float,
    amplitude: float,
    spread: float = 0.0,
) -> LabelledArrays:
    """A fraction ``shown`` of the cells shows the label's pattern, each scaled by ``exp(spread * N(0, 1))``."""
    labels = draw_labels(count, rng)
    shows = rng.random((count, CELLS, CELLS, 1), dtype=np.float32) < shown
    cells = draw_noise(count, rng)
    cells += np.float32(amplitude) * shows * patterns[labels][:, None, None]
    cells *= np.exp(np.float32(spread) * rng.standard_normal((count, CELLS, CELLS, 1), dtype=np.float32))
    return LabelledArrays(cells, labels)


def sample_agreement(count: int, patterns: Float32s, rng: np.random.Generator, *, amplitude: float) -> LabelledArrays:
    """Top and bottom half each show a sign along two patterns; the label's bits are whether these agree."""
    first, last = rng.integers(2, size=(2, 2, count))
    cells = draw_noise(count, rng)
    half = CELLS // 2
    for part, bits in ((cells[:, :half], first), (cells[:, half:], last)):
        signs = (2 * bits - 1).astype(np.float32)
        part += np.float32(amplitude) * (signs.T @ patterns[:2])[:, None, None]
    agreement = first == last
    return LabelledArrays(cells, agreement[0] + 2 * agreement[1].astype(np.int64))


def sample_pointer(
    count: int, patterns: Float32s, rng: np.random.Generator, *, amplitude: float, mark: float, marks: int
) -> LabelledArrays:
    """The label is the symbol right of the marked cells; all other symbols are uniform."""
    labels = draw_labels(count, rng)
    symbols = rng.integers(CLASSES, size=(count, CELLS, CELLS))
    marked = np.zeros((count, CELLS, CELLS), bool)
    rows = np.arange(count)
    for _ in range(marks):
        row, column = rng.integers(CELLS, size=count), 2 * rng.integers(CELLS // 2, size=count)
        marked[rows, row, column] = True
        symbols[rows, row, column + 1] = labels
    cells = draw_noise(count, rng)
    cells += np.float32(amplitude) * patterns[symbols]
    cells += np.float32(mark) * marked[..., None] * patterns[CLASSES]
    return LabelledArrays(cells, labels)


def arrange_cells(cells: Float32s) -> Float32s:
    """Cells ``[N, CELLS, CELLS, PIXELS]`` as images ``[N, COLOURS, SIDE, SIDE]``."""
    count = len(cells)
    pixels = cells.reshape(count, CELLS, CELLS, COLOURS, CELL, CELL).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(pixels).reshape(count, COLOURS, SIDE, SIDE)


# The host


class PixelLayer(TokenLayer):
    """``act(W h + b)`` on every pixel: features ``[..., B, C, H, W]`` to ``[..., B, outputs, H, W]``."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(features.flatten(-2).mT).mT
        return outputs.view(*outputs.shape[:-1], *features.shape[-2:])


class CellLayer(TokenLayer):
    """``act(W h + b)`` on each cell of images ``[..., B, COLOURS, SIDE, SIDE]``, to ``[..., B, C, CELLS, CELLS]``."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        squares = features.reshape(*features.shape[:-2], CELLS, CELL, CELLS, CELL)
        # [..., B, colour, row of cells, row, column of cells, column]: one copy, with the batch innermost.
        pixels = squares.movedim((-6, -5, -3, -1, -4, -2), (-1, -6, -5, -4, -3, -2))
        cells = pixels.flatten(-6, -4).flatten(-3, -2).transpose(-3, -1)  # [..., B, CELLS * CELLS, PIXELS]
        outputs = super().forward(cells).mT
        return outputs.view(*outputs.shape[:-1], CELLS, CELLS)


class PoolingLayer(PixelLayer):
    """A `PixelLayer` on the means of 2 x 2 pixels."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        # Sums of strided views, several times faster than `mean` over two axes.
        rows = features[..., ::2, :] + features[..., 1::2, :]
        return super().forward((rows[..., ::2] + rows[..., 1::2]) / 4)


class ImageHost(Stackable):
    """Three layers, the sites, a mean over pixels and a linear head: images to logits ``[..., B, CLASSES]``."""

    def __init__(self, widths: Sequence[int], *, linear_host: bool, generator: torch.Generator) -> None:
        super().__init__()
        slope = 1.0 if linear_host else 0.0
        first, second, third = widths
        self.layer0 = CellLayer(PIXELS, first, slope, generator)
        self.layer1 = PixelLayer(first, second, slope, generator)
        self.layer2 = PoolingLayer(second, third, slope, generator)
        self.head = Linear(third, CLASSES, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.layer2(self.layer1(self.layer0(inputs)))
        return self.head(average_tokens(features.flatten(-2).mT))


# Families and their hidden variants

FULL = (8, 12, 12)

_near = partial(sample_neighbours, block=1, faithful=0.85, amplitude=4.0)
_coarse = partial(sample_neighbours, block=2, faithful=0.9, amplitude=3.0)
_clear = partial(sample_vote, shown=1.0, amplitude=0.5)

TRAINING: Families = {
    "near": {"8_12_12": Variant(_near, widths=(8, 12, 12))},
    "coarse": {"8_10_12": Variant(_coarse, widths=(8, 10, 12))},
    "ctx": {"8_10_10": Variant(partial(sample_context, everywhere=0.8, amplitude=6.0), widths=(8, 10, 10))},
    "quad": {"linear": Variant(partial(sample_power, deviation=1.5, factor=1.6), host=LINEAR)},
    "loud": {"8_8_8": Variant(partial(sample_vote, shown=0.3, amplitude=3.0, spread=1.8))},
    "plain": {"noisy": Variant(_clear, train_sizes=(128,), label_noise=0.5)},
    "drift": {"near": Variant(_clear, widths=(8, 10, 10), after_drift=_near)},
}

TRANSFER: Families = {
    "pointer": {"near": Variant(partial(sample_pointer, amplitude=3.0, mark=4.0, marks=6), widths=(8, 12, 12))},
    "agreement": {"8_10_10": Variant(partial(sample_agreement, amplitude=2.0), widths=(8, 10, 10))},
}


# The suite

_PATTERNS_STREAM = len(PARTS)


class ImageSuite(SampledSuite, VariantSuite):
    """Images of 32 x 32 pixels and four classes, and one host architecture for every family."""

    name = "images"
    classes = CLASSES
    input_shape = (COLOURS, SIDE, SIDE)
    sites = ("layer0", "layer1", "layer2")
    blueprints = ("norm", "conv1x1", "depthwise", "gate")
    steps = 30
    batches_per_step = 8
    batch_size = 16
    validation_size = 128
    test_size = 384
    optimizer = OptimizerSettings(clip_norm=1.0)
    kind = "image family"
    table = {**TRAINING, **TRANSFER}
    widths = (8, 8, 8)
    train_sizes = (512,)
    rent = 0.08
    learning_rates = (0.008, 0.012)
    drift_steps = range(7, 10)
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        linear = self.find_variant(family, variant).host == LINEAR
        return replace(super().draw(family, variant, seed, rng), linear=linear)

    def template(self) -> ImageHost:
        return ImageHost(FULL, linear_host=False, generator=torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> ImageHost:
        self.check(instance)
        generator = torch.Generator().manual_seed(instance.seed)
        return ImageHost(instance.widths, linear_host=instance.linear, generator=generator)

    def sample_part(self, instance: Instance, part: Part, phase: int) -> LabelledArrays:
        sampler: Sampler = self.find_sampler(instance, phase)
        rng = child_generator(instance.seed, phase, PARTS.index(part))
        # Patterns are the same for every part of a phase; examples have a random stream per part.
        patterns = draw_patterns(child_generator(instance.seed, phase, _PATTERNS_STREAM))
        cells, labels = sampler(self.count_examples(instance, part), patterns, rng)
        if part == "train" and instance.label_noise:
            labels = add_label_noise(labels, instance.label_noise, CLASSES, rng)
        return LabelledArrays(arrange_cells(cells), labels)
