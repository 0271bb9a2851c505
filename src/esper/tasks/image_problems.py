"""The problems of the suite `images`: samplers of coloured 32 x 32 images of ten classes.

What is fixed for an instance (colours, patterns, angles) is drawn from one generator, the examples from another. So all
parts of an instance pose the same problem.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from esper.numerics.arrays import Bools, Float32s, Floats, Ints
from esper.tasks.datasets import digits
from esper.tasks.instance import PARTS, LabelledArrays, Part

SIDE, COLOURS, CLASSES = 32, 3, 10

Sampler = Callable[[int, Part, np.random.Generator, np.random.Generator], LabelledArrays]
"""Maps ``(N, part, fixed, fresh)`` to N examples ``[N, COLOURS, SIDE, SIDE]``. The generator ``fixed`` has the same
seed for every part of an instance, ``fresh`` another one for each part."""


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
    part: Part,
    fixed: np.random.Generator,
    fresh: np.random.Generator,
    *,
    periods: tuple[float, float],
    noise: float,
    spread: float = 0.0,
) -> LabelledArrays:
    """The class is the orientation and period of a noisy grating with random phase, in one colour.

    ``periods`` are in pixels. Each image is scaled by ``exp(spread * N(0, 1))``: with a large spread the brightest
    images dominate, and normalising the features pays.
    """
    del part
    labels = draw_labels(count, fresh)
    angles = np.pi * (labels % ORIENTATIONS + fixed.random()) / ORIENTATIONS
    frequencies = 1 / np.array(periods)[labels // ORIENTATIONS]
    # Position along the direction of the grating, in periods.
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
    count: int, part: Part, fixed: np.random.Generator, fresh: np.random.Generator, *, radii: tuple[float, float]
) -> LabelledArrays:
    """The class is the shape of a figure with random colour and place, and a radius in pixels between ``radii``."""
    del part, fixed
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
    count: int, part: Part, fixed: np.random.Generator, fresh: np.random.Generator, *, copies: int
) -> LabelledArrays:
    """The class is that of a small pattern, of which ``copies`` are added to noise at random places."""
    del part
    patterns = fixed.choice(np.array([-1, 1], np.float32), size=(CLASSES, COLOURS, PATTERN, PATTERN))
    labels = draw_labels(count, fresh)
    images = draw_background(count, 0.5, fresh)
    for _ in range(copies):
        rows, columns = fresh.integers(SIDE - PATTERN + 1, size=(2, count))
        _add_at(images, patterns[labels], rows, columns)
    return LabelledArrays(images, labels)


# Colours

HUE_STRENGTH, HUE_NOISE = 0.35, 1.0


def sample_hue(count: int, part: Part, fixed: np.random.Generator, fresh: np.random.Generator) -> LabelledArrays:
    """The class is the hue of the whole noisy image: the mean over pixels shows it, so hardly any growth pays."""
    del part
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
    count: int, part: Part, fixed: np.random.Generator, fresh: np.random.Generator, *, size: int
) -> LabelledArrays:
    """The class is the number, one to ten, of bright squares with sides of ``size`` pixels, which may overlap."""
    del part, fixed
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
