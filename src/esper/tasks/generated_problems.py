"""The problems of the generated suites: samplers of labelled examples, by the kind of input.

A sampler draws what is fixed for an instance (directions, templates, tables) from one generator, and the examples from
another. So all parts of an instance pose the same problem.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from esper.numerics.arrays import Float32s, Floats, Ints
from esper.tasks.datasets import digits, mnist1d
from esper.tasks.instance import PARTS, LabelledArrays


@dataclass(frozen=True)
class Shape:
    """The sizes of a suite's inputs."""

    classes: int
    positions: int
    """Number of tokens or samples, or pixels per side; 1 for plain features."""
    channels: int
    """Number of features of a token, or of an example without tokens."""


@dataclass(frozen=True)
class Draw:
    """What to draw: the number of examples, the part of an instance's data, and the generators to draw from."""

    count: int
    """N, the number of examples."""
    part: int
    """Index of the part in `PARTS`."""
    fixed: np.random.Generator
    """Has the same seed for every part of an instance."""
    fresh: np.random.Generator
    """Has a different seed for each part."""


Sampler = Callable[[Shape, Draw], LabelledArrays]


def _labelled(inputs: Floats | Float32s, labels: Ints) -> LabelledArrays:
    return LabelledArrays(inputs.astype(np.float32), labels.astype(np.int64))


def _label_by_score(score: Callable[[Floats], Floats], inputs: Floats, draw: Draw) -> Ints:
    """The class ``[N]`` with the highest score ``[N, C]``."""
    # Scores are standardised on other random inputs, so that no class is rare.
    reference = score(draw.fixed.standard_normal((512, inputs.shape[1])))
    return ((score(inputs) - reference.mean(0)) / reference.std(0)).argmax(1)


# Plain features [N, D].


def sample_teacher(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the largest output of a random network with one hidden layer."""
    hidden = draw.fixed.standard_normal((shape.channels, 12)) / np.sqrt(shape.channels)
    head = draw.fixed.standard_normal((12, shape.classes))
    inputs = draw.fresh.standard_normal((draw.count, shape.channels))
    return _labelled(inputs, _label_by_score(lambda x: np.maximum(2 * x @ hidden, 0) @ head, inputs, draw))


CLUSTERS = 3
"""Number of clusters per class."""


def sample_clusters(shape: Shape, draw: Draw) -> LabelledArrays:
    """Each class is several Gaussian clusters, so that classes are not linearly separable."""
    centres = 1.2 * draw.fixed.standard_normal((shape.classes, CLUSTERS, shape.channels))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    means = centres[labels, draw.fresh.integers(CLUSTERS, size=draw.count)]
    return _labelled(means + draw.fresh.standard_normal(means.shape), labels)


def sample_table(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class of a row in a table depends on products of a few columns.

    Some columns are heavy-tailed, others uninformative.
    """
    informative = draw.fixed.permutation(shape.channels)[: max(shape.channels // 2, 4)]
    pairs = draw.fixed.choice(informative, size=(shape.classes, 3, 2))
    signs = draw.fixed.choice([-1.0, 1.0], size=(shape.classes, 3))
    heavy = draw.fixed.random(shape.channels) < 0.3

    def score(columns: Floats) -> Floats:
        first, second = columns[:, pairs[..., 0]], columns[:, pairs[..., 1]]
        return (signs * (np.tanh(first * second) + 0.5 * first)).sum(-1)

    inputs = draw.fresh.standard_normal((draw.count, shape.channels))
    labels = _label_by_score(score, inputs, draw)
    return _labelled(np.where(heavy, np.sinh(inputs), inputs), labels)


# Tokens [N, T, D]: each is a noisy embedding of one of a few symbols.


def _embed_symbols(symbols: Ints, shape: Shape, draw: Draw, kinds: int) -> Floats:
    """Noisy embeddings ``[N, T, D]`` of symbols ``[N, T]``."""
    vectors = draw.fixed.standard_normal((kinds, shape.channels))
    vectors *= 1.5 * np.sqrt(2) / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[symbols] + 0.5 * draw.fresh.standard_normal((*symbols.shape, shape.channels))


FAITHFUL = 0.85
"""Fraction of the symbols that follow a rule; the others are uniform."""


def sample_relation(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the difference, modulo the number of classes, of two symbols at a fixed distance.

    A host has to mix tokens to find it.
    """
    distance = int(draw.fixed.integers(1, max(shape.positions // 2, 2)))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions))
    follows = draw.fresh.random((draw.count, shape.positions)) < FAITHFUL
    for token in range(distance, shape.positions):
        successor = (symbols[:, token - distance] + labels) % shape.classes
        symbols[:, token] = np.where(follows[:, token], successor, symbols[:, token])
    return _labelled(_embed_symbols(symbols, shape, draw, shape.classes), labels)


def sample_majority(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the most frequent symbol."""
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions))
    shown = draw.fresh.random((draw.count, shape.positions)) < 0.35
    symbols = np.where(shown, labels[:, None], symbols)
    return _labelled(_embed_symbols(symbols, shape, draw, shape.classes), labels)


def sample_switched(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the most frequent symbol, or the one before it, depending on the token at a fixed position."""
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions))
    reading = draw.fresh.integers(2, size=draw.count)
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    shown = np.where(reading == 0, labels, (labels + 1) % shape.classes)
    symbols = np.where(draw.fresh.random(symbols.shape) < 0.5, shown[:, None], symbols)
    symbols[:, int(draw.fixed.integers(shape.positions))] = shape.classes + reading
    return _labelled(_embed_symbols(symbols, shape, draw, shape.classes + 2), labels)


# Signals [N, 1, L].


def sample_motif(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is that of a short curve added to noise at a random place."""
    length = 9
    curves = np.cumsum(draw.fixed.standard_normal((shape.classes, length)), axis=1)
    curves = 1.4 * (curves - curves.mean(1, keepdims=True)) / curves.std(1, keepdims=True)
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    signals = 0.7 * draw.fresh.standard_normal((draw.count, shape.positions))
    places = draw.fresh.integers(shape.positions - length + 1, size=draw.count)[:, None] + np.arange(length)
    # Add each curve at its random place.
    np.add.at(signals, (np.arange(draw.count)[:, None], places), curves[labels])
    return _labelled(signals[:, None], labels)


def sample_wave(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the frequency of a wave with random phase."""
    frequencies = draw.fixed.permutation(np.linspace(1.0, shape.positions / 5, shape.classes))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    turns = frequencies[labels, None] * np.arange(shape.positions) / shape.positions + draw.fresh.random(
        (draw.count, 1)
    )
    signals = np.sin(2 * np.pi * turns) + 0.8 * draw.fresh.standard_normal((draw.count, shape.positions))
    return _labelled(signals[:, None], labels)


def sample_curve(shape: Shape, draw: Draw) -> LabelledArrays:
    """A few classes of MNIST-1D, with noise."""
    signals = _draw_examples(mnist1d(), shape, draw)
    return LabelledArrays(signals.inputs[:, None], signals.labels)


def _draw_examples(dataset: LabelledArrays, shape: Shape, draw: Draw) -> LabelledArrays:
    """Noisy examples of ``shape.classes`` random classes of a data set; parts share no rows."""
    # The fixed generator chooses classes, noise level and each part's rows; the fresh one draws from these rows.
    chosen = draw.fixed.permutation(dataset.labels.max() + 1)[: shape.classes]
    grain = draw.fixed.uniform(0.1, 0.5) * dataset.inputs.std()
    rows = draw.fixed.permutation(np.flatnonzero(np.isin(dataset.labels, chosen)))[draw.part :: len(PARTS)]
    rows = rows[draw.fresh.integers(len(rows), size=draw.count)]
    order = np.empty(dataset.labels.max() + 1, np.int64)
    order[chosen] = np.arange(shape.classes)
    inputs = dataset.inputs[rows] + grain * draw.fresh.standard_normal((draw.count, dataset.inputs.shape[1]))
    return _labelled(inputs, order[dataset.labels[rows]])


# Images [N, 1, H, H].


def sample_texture(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the orientation of a grating with random phase."""
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    angles = np.pi * (labels + draw.fixed.random()) / shape.classes
    frequency = draw.fixed.uniform(1.5, 2.5)
    along_side: Floats = np.arange(shape.positions) / shape.positions
    row, column = np.meshgrid(along_side, along_side, indexing="ij")
    # Position along the direction of the grating.
    along = np.cos(angles)[:, None, None] * row + np.sin(angles)[:, None, None] * column
    images = np.sin(2 * np.pi * (frequency * along + draw.fresh.random((draw.count, 1, 1))))
    return _labelled((images + 0.7 * draw.fresh.standard_normal(images.shape))[:, None], labels)


def sample_patch(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is that of a small pattern added to noise at a random place."""
    side = 3
    patterns = 1.6 * np.sign(draw.fixed.standard_normal((shape.classes, side, side)))
    labels = draw.fresh.integers(shape.classes, size=draw.count)
    images = 0.6 * draw.fresh.standard_normal((draw.count, shape.positions, shape.positions))
    corner = draw.fresh.integers(shape.positions - side + 1, size=(2, draw.count))
    rows = corner[0][:, None, None] + np.arange(side)[:, None]
    columns = corner[1][:, None, None] + np.arange(side)
    images[np.arange(draw.count)[:, None, None], rows, columns] += patterns[labels]
    return _labelled(images[:, None], labels)


def sample_handwriting(shape: Shape, draw: Draw) -> LabelledArrays:
    """A few classes of the handwritten digits, with noise."""
    images = _draw_examples(digits(), shape, draw)
    return LabelledArrays(images.inputs.reshape(draw.count, 1, 8, 8), images.labels)


# Symbol sequences [N, T, V], one-hot: the class is the next symbol.


def _split_last_symbol(symbols: Ints, shape: Shape) -> LabelledArrays:
    """Split symbols ``[N, T + 1]`` into one-hot inputs ``[N, T, V]`` and the last symbol, which is the label."""
    return _labelled(np.eye(shape.classes)[symbols[:, :-1]], symbols[:, -1])


def sample_chain(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the next symbol of a second-order Markov chain."""
    table = draw.fixed.integers(shape.classes, size=(shape.classes, shape.classes))
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions + 1))
    follows = draw.fresh.random(symbols.shape) < FAITHFUL
    for token in range(2, shape.positions + 1):
        successor = table[symbols[:, token - 2], symbols[:, token - 1]]
        symbols[:, token] = np.where(follows[:, token], successor, symbols[:, token])
    return _split_last_symbol(symbols, shape)


def sample_echo(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the next symbol of a sequence in which each symbol repeats the one a fixed distance before."""
    distance = int(draw.fixed.integers(2, max(shape.positions // 2, 3)))
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions + 1))
    follows = draw.fresh.random(symbols.shape) < FAITHFUL
    for token in range(distance, shape.positions + 1):
        symbols[:, token] = np.where(follows[:, token], symbols[:, token - distance], symbols[:, token])
    return _split_last_symbol(symbols, shape)


def sample_recall(shape: Shape, draw: Draw) -> LabelledArrays:
    """The class is the symbol that followed the only earlier occurrence of the last symbol, at a random place."""
    symbols = draw.fresh.integers(shape.classes, size=(draw.count, shape.positions + 1))
    place = draw.fresh.integers(shape.positions - 2, size=draw.count)
    rows = np.arange(draw.count)
    cue = symbols[rows, place]
    # The cue occurs at its earlier place and at the end, nowhere else.
    symbols = np.where(symbols == cue[:, None], (symbols + 1) % shape.classes, symbols)
    symbols[rows, place] = symbols[:, -2] = cue
    symbols[:, -1] = symbols[rows, place + 1]
    return _split_last_symbol(symbols, shape)


PROBLEMS: Mapping[str, Mapping[str, Sampler]] = {
    "mlp": {"teacher": sample_teacher, "clusters": sample_clusters, "table": sample_table},
    "tokens": {"relation": sample_relation, "majority": sample_majority, "switched": sample_switched},
    "signals": {"motif": sample_motif, "wave": sample_wave, "curve": sample_curve},
    "images": {"texture": sample_texture, "patch": sample_patch, "handwriting": sample_handwriting},
    "language": {"chain": sample_chain, "echo": sample_echo, "recall": sample_recall},
}
"""Samplers by the kind of host and the name of the problem."""
