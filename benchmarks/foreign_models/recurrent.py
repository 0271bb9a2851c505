"""Recurrent models: classifiers of series and of text, and a language model."""

from __future__ import annotations

from pydoc_data import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign_models.problem import Problem, Recipe, Splits, floats, split, token_cross_entropy
from foreign_models.sources import read_help, split_help

MOTIONS = 6


class SeriesClassifier(nn.Module):
    """Series ``[B, T, 2]`` to logits ``[B, 6]``."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 12, batch_first=True)
        self.head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, MOTIONS))

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.gru(series)
        return self.head(states[:, -1])


def split_motions(seed: int) -> Splits:
    """Noisy figures that a point draws: three ratios of frequencies, in two directions."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(MOTIONS, size=1800)
    ratio, direction = 1 + labels % 3, np.where(labels < 3, 1, -1)
    time = np.linspace(0, 1, 40) * rng.uniform(1.5, 2.5, (len(labels), 1)) + rng.random((len(labels), 1))
    angle = 2 * np.pi * direction[:, None] * time
    series = np.stack([np.cos(angle), np.sin(ratio[:, None] * angle)], axis=-1)
    return split(floats(series + 0.5 * rng.standard_normal(series.shape)), torch.from_numpy(labels), seed, 300, 500)


PAGES = ("specialnames", "compound", "formatstrings", "string-methods", "debugger")
"""Pages of Python's help."""
LINE = 32
"""Characters of a piece."""


class PageClassifier(nn.Module):
    """Characters, int64 ``[B, T]``, to logits ``[B, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 12)
        self.lstm = nn.LSTM(12, 20, batch_first=True, bidirectional=True)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(40, len(PAGES))

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(characters))
        return self.head(self.dropout(states.mean(1)))


def split_pages(seed: int) -> Splits:
    """Pieces of five pages of Python's help, 400 of each, and which page they are of."""
    pieces, labels = [], []
    for label, page in enumerate(PAGES):
        codes = np.minimum(np.array([ord(character) for character in topics.topics[page]]), 127)
        starts = np.linspace(0, len(codes) - LINE, 400).astype(int)
        pieces.append(codes[starts[:, None] + np.arange(LINE)])
        labels += [label] * len(starts)
    return split(torch.from_numpy(np.concatenate(pieces)), torch.tensor(labels), seed, 300, 500)


class CharacterModel(nn.Module):
    """Characters, int64 ``[B, T]``, to logits of the next one, ``[B, T, vocabulary]``."""

    def __init__(self) -> None:
        super().__init__()
        _, vocabulary = read_help()
        self.embed, self.gru = nn.Embedding(vocabulary, 24), nn.GRU(24, 40, batch_first=True)
        self.head = nn.Linear(40, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.gru(self.embed(characters))
        return self.head(states)


PROBLEMS = (
    Problem(
        name="gru_classifier",
        build=SeriesClassifier,
        data=split_motions,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=5e-3, clip_norm=1.0),
        slots={"gru": ["mlp", "lowrank", "token_conv"], "head.1": ["mlp", "lowrank"]},
    ),
    Problem(
        name="lstm_classifier",
        build=PageClassifier,
        data=split_pages,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=3e-3, clip_norm=1.0),
        slots={"embed": ["mlp", "lowrank", "token_conv"], "lstm": ["mlp", "lowrank", "token_conv"]},
    ),
    Problem(
        name="gru_language_model",
        build=CharacterModel,
        data=lambda seed: split_help(seed, 32),
        task="language_modelling",
        loss=token_cross_entropy,
        recipe=Recipe(epochs=16, batch_size=50, learning_rate=5e-3, clip_norm=1.0),
        slots={"embed": ["mlp", "lowrank"], "gru": ["mlp", "lowrank"]},
    ),
)
