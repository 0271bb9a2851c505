"""What generated suites ask: pure samplers of labelled examples, by the kind of input.

A sampler draws what is fixed for its instance (directions, templates, tables) from one generator and the examples from
another, so every part of an instance asks the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from esper.numerics.arrays import Float32s, Floats, Ints
from esper.tasks.datasets import digits, mnist1d
from esper.tasks.instance import PARTS, LabelledArrays


@dataclass(frozen=True)
class Shape:
    """How large the inputs of a suite are."""

    classes: int
    positions: int
    """Tokens, samples, or pixels on a side; 1 for plain features."""
    channels: int
    """Features of a token, or of an example."""


@dataclass(frozen=True)
class Draw:
    """What a part of an instance's data is drawn from."""

    count: int
    """N examples."""
    part: int
    """An index of `PARTS`."""
    fixed: np.random.Generator
    """Yields the same numbers for every part of an instance."""
    fresh: np.random.Generator
    """Yields others for each."""


Sampler = Callable[[Shape, Draw], LabelledArrays]


def _labelled(inputs: Floats | Float32s, labels: Ints) -> LabelledArrays:
    return LabelledArrays(inputs.astype(np.float32), labels.astype(np.int64))


def _label_by(score: Callable[[Floats], Floats], inputs: Floats, draw: Draw) -> Ints:
    """The class ``[N]`` with the highest score ``[N, C]``, each standardised over other inputs: no class is rare."""
    typical_scores = score(draw.fixed.standard_normal((512, inputs.shape[1])))
    return ((score(inputs) - typical_scores.mean(0)) / typical_scores.std(0)).argmax(1)


# Plain features [N, D].


def teacher(shape: Shape, draw: Draw) -> LabelledArrays:
    """The largest output of a random network with one hidden layer."""
    hidden = draw.fixed.standard_normal((shape.channels, 12)) / np.sqrt(shape.channels)
    head = draw.fixed.standard_normal((12, shape.classes))
    inputs = draw.fresh.standard_normal((draw.count, shape.channels))
    return _labelled(inputs, _label_by(lambda x: np.maximum(2 * x @ hidden, 0) @ head, inputs, draw))


CLUSTERS = 3
"""Clusters of each class."""


def clusters(shape: Shape, draw: Draw) -> LabelledArrays:
    """Classes of several clusters each, which no line separates."""
    centres = 1.2 * draw.fixed.standard_normal((shape.classes, CLUSTERS, shape.channels))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    around = centres[labels, draw.fresh.integers(CLUSTERS, size=draw.count)]
    return _labelled(around + draw.fresh.standard_normal(around.shape), labels)


def table(shape: Shape, draw: Draw) -> LabelledArrays:
    """Columns as in a table: the class follows from products of a few, some are heavy-tailed, others say nothing."""
    telling = draw.fixed.permutation(shape.channels)[: max(shape.channels // 2, 4)]
    pairs = draw.fixed.choice(telling, size=(shape.classes, 3, 2))
    signs = draw.fixed.choice([-1.0, 1.0], size=(shape.classes, 3))
    heavy = draw.fixed.random(shape.channels) < 0.3

    def score(columns: Floats) -> Floats:
        one, other = columns[:, pairs[..., 0]], columns[:, pairs[..., 1]]
        return (signs * (np.tanh(one * other) + 0.5 * one)).sum(-1)

    inputs = draw.fresh.standard_normal((draw.count, shape.channels))
    labels = _label_by(score, inputs, draw)
    return _labelled(np.where(heavy, np.sinh(inputs), inputs), labels)


# Tokens [N, T, D]: each a noisy vector that stands for one of a few symbols.


def _show_symbols(symbols: Ints, shape: Shape, draw: Draw, kinds: int) -> Floats:
    """Symbols ``[N, T]`` as vectors ``[N, T, D]``."""
    vectors = draw.fixed.standard_normal((kinds, shape.channels))
    vectors *= 1.5 * np.sqrt(2) / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[symbols] + 0.5 * draw.fresh.standard_normal((*symbols.shape, shape.channels))


FAITHFUL = 0.85
"""Share of the symbols that follow a rule; the others are uniform."""


def relation(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is what is added, modulo the classes, from a token to the one some places on: only mixing helps."""
    distance = int(draw.fixed.integers(1, max(shape.positions // 2, 2)))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions))
    follows = draw.fresh.random((draw.count, shape.positions)) < FAITHFUL
    for token in range(distance, shape.positions):
        successor = (symbols[:, token - distance] + labels) % shape.classes
        symbols[:, token] = np.where(follows[:, token], successor, symbols[:, token])
    return _labelled(_show_symbols(symbols, shape, draw, shape.classes), labels)


def majority(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the symbol shown more often than others."""
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions))
    shown = draw.fresh.random((draw.count, shape.positions)) < 0.35
    symbols = np.where(shown, labels[:, None], symbols)
    return _labelled(_show_symbols(symbols, shape, draw, shape.classes), labels)


def switched(shape: Shape, draw: Draw) -> LabelledArrays:
    """One token says which of two readings of the others counts."""
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions))
    reading = draw.fresh.integers(2, size=draw.count)
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    shown = np.where(reading == 0, labels, (labels + 1) % shape.classes)
    symbols = np.where(draw.fresh.random(symbols.shape) < 0.5, shown[:, None], symbols)
    symbols[:, int(draw.fixed.integers(shape.positions))] = shape.classes + reading
    return _labelled(_show_symbols(symbols, shape, draw, shape.classes + 2), labels)


# Signals [N, 1, L].


def motif(shape: Shape, draw: Draw) -> LabelledArrays:
    """Which of a few short curves is hidden somewhere in the noise."""
    length = 9
    curves = np.cumsum(draw.fixed.standard_normal((shape.classes, length)), axis=1)
    curves = 1.4 * (curves - curves.mean(1, keepdims=True)) / curves.std(1, keepdims=True)
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    signals = 0.7 * draw.fresh.standard_normal((draw.count, shape.positions))
    places = draw.fresh.integers(shape.positions - length + 1, size=draw.count)[:, None] + np.arange(length)
    np.add.at(signals, (np.arange(draw.count)[:, None], places), curves[labels])
    return _labelled(signals[:, None], labels)


def wave(shape: Shape, draw: Draw) -> LabelledArrays:
    """Which of a few frequencies a wave of any phase has."""
    frequencies = draw.fixed.permutation(np.linspace(1.0, shape.positions / 5, shape.classes))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    turns = frequencies[labels, None] * np.arange(shape.positions) / shape.positions + draw.fresh.random(
        (draw.count, 1)
    )
    signals = np.sin(2 * np.pi * turns) + 0.8 * draw.fresh.standard_normal((draw.count, shape.positions))
    return _labelled(signals[:, None], labels)


def curve(shape: Shape, draw: Draw) -> LabelledArrays:
    """MNIST-1D, some of its ten classes, with some grain."""
    signals = _draw_rows(mnist1d(), shape, draw)
    return LabelledArrays(signals.inputs[:, None], signals.labels)


def _draw_rows(known: LabelledArrays, shape: Shape, draw: Draw) -> LabelledArrays:
    """Examples of so many classes of a data set, those of a part its own, with noise so that no two are the same."""
    chosen = draw.fixed.permutation(known.labels.max() + 1)[: shape.classes]
    grain = draw.fixed.uniform(0.1, 0.5) * known.inputs.std()
    rows = draw.fixed.permutation(np.flatnonzero(np.isin(known.labels, chosen)))[draw.part :: len(PARTS)]
    rows = rows[draw.fresh.integers(len(rows), size=draw.count)]
    order = np.empty(known.labels.max() + 1, np.int64)
    order[chosen] = np.arange(shape.classes)
    inputs = known.inputs[rows] + grain * draw.fresh.standard_normal((draw.count, known.inputs.shape[1]))
    return _labelled(inputs, order[known.labels[rows]])


# Images [N, 1, H, H].


def texture(shape: Shape, draw: Draw) -> LabelledArrays:
    """Which way a grating of any phase runs."""
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    angles = np.pi * (labels + draw.fixed.random()) / shape.classes
    frequency = draw.fixed.uniform(1.5, 2.5)
    along_side: Floats = np.arange(shape.positions) / shape.positions
    row, column = np.meshgrid(along_side, along_side, indexing="ij")
    along = np.cos(angles)[:, None, None] * row + np.sin(angles)[:, None, None] * column
    images = np.sin(2 * np.pi * (frequency * along + draw.fresh.random((draw.count, 1, 1))))
    return _labelled((images + 0.7 * draw.fresh.standard_normal(images.shape))[:, None], labels)


def patch(shape: Shape, draw: Draw) -> LabelledArrays:
    """Which of a few small patterns is hidden somewhere in the noise."""
    side = 3
    patterns = 1.6 * np.sign(draw.fixed.standard_normal((shape.classes, side, side)))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    images = 0.6 * draw.fresh.standard_normal((draw.count, shape.positions, shape.positions))
    corner = draw.fresh.integers(shape.positions - side + 1, size=(2, draw.count))
    rows = corner[0][:, None, None] + np.arange(side)[:, None]
    columns = corner[1][:, None, None] + np.arange(side)
    images[np.arange(draw.count)[:, None, None], rows, columns] += patterns[labels]
    return _labelled(images[:, None], labels)


def handwriting(shape: Shape, draw: Draw) -> LabelledArrays:
    """Handwritten digits, some of their ten classes, with some grain."""
    images = _draw_rows(digits(), shape, draw)
    return LabelledArrays(images.inputs.reshape(draw.count, 1, 8, 8), images.labels)


# Symbols to be continued [N, T, V], one-hot: the class is the next one.


def _next_symbol(symbols: Ints, shape: Shape) -> LabelledArrays:
    """Symbols ``[N, T + 1]``, of which the last is asked for."""
    return _labelled(np.eye(shape.classes)[symbols[:, :-1]], symbols[:, -1])


def chain(shape: Shape, draw: Draw) -> LabelledArrays:
    """The next symbol of a Markov chain of second order."""
    table = draw.fixed.integers(shape.classes, size=(shape.classes, shape.classes))
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions + 1))
    follows = draw.fresh.random(symbols.shape) < FAITHFUL
    for token in range(2, shape.positions + 1):
        successor = table[symbols[:, token - 2], symbols[:, token - 1]]
        symbols[:, token] = np.where(follows[:, token], successor, symbols[:, token])
    return _next_symbol(symbols, shape)


def echo(shape: Shape, draw: Draw) -> LabelledArrays:
    """Each symbol is the one some places before."""
    distance = int(draw.fixed.integers(2, max(shape.positions // 2, 3)))
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions + 1))
    follows = draw.fresh.random(symbols.shape) < FAITHFUL
    for token in range(distance, shape.positions + 1):
        symbols[:, token] = np.where(follows[:, token], symbols[:, token - distance], symbols[:, token])
    return _next_symbol(symbols, shape)


def recall(shape: Shape, draw: Draw) -> LabelledArrays:
    """What followed the last symbol when it was seen before: found by its content, wherever that was."""
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions + 1))
    place = draw.fresh.integers(shape.positions - 2, size=draw.count)
    rows = np.arange(draw.count)
    cue = symbols[rows, place]
    symbols = np.where(symbols == cue[:, None], (symbols + 1) % shape.classes, symbols)
    symbols[rows, place] = symbols[:, -2] = cue
    symbols[:, -1] = symbols[rows, place + 1]
    return _next_symbol(symbols, shape)


PROBLEMS: Mapping[str, Mapping[str, Sampler]] = {
    "mlp": {"teacher": teacher, "clusters": clusters, "table": table},
    "tokens": {"relation": relation, "majority": majority, "switched": switched},
    "signals": {"motif": motif, "wave": wave, "curve": curve},
    "images": {"texture": texture, "patch": patch, "handwriting": handwriting},
    "language": {"chain": chain, "echo": echo, "recall": recall},
}
"""Samplers by kind of host and the problem's name."""
