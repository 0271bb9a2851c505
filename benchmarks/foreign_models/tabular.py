"""Fully connected models of tables: two that scikit-learn ships, and five drawn ones."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, make_friedman1, make_multilabel_classification
from torch import Tensor, nn
from torch.nn import functional as F

from foreign_models.problem import Problem, Recipe, Splits, floats, split, standardise


def make_mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def split_breast_cancer(seed: int) -> Splits:
    bunch = load_breast_cancer()
    return standardise(split(floats(bunch.data), torch.from_numpy(bunch.target).long(), seed, 120, 170))


def split_diabetes(seed: int) -> Splits:
    bunch = load_diabetes()
    splits = standardise(split(floats(bunch.data), floats(bunch.target[:, None]), seed, 90, 110))
    return standardise(splits, targets=True)


def split_friedman(seed: int) -> Splits:
    inputs, targets = make_friedman1(2000, noise=1.0, random_state=seed)
    return standardise(standardise(split(floats(inputs), floats(targets[:, None]), seed, 300, 700)), targets=True)


def split_labels(seed: int) -> Splits:
    # One draw makes classes and examples; its split is what varies.
    inputs, labels = make_multilabel_classification(2000, n_features=30, n_classes=8, n_labels=3, random_state=0)
    return standardise(split(floats(inputs), floats(labels), seed, 300, 700))


CATEGORIES = (12, 6, 4)
"""Values of the columns that hold categories."""
NUMBERS = 6
"""Columns that hold numbers."""


class MixedTable(nn.Module):
    """Numbers ``[B, 6]`` and categories int64 ``[B, 3]``, which are embedded, to logits ``[B, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, 4) for count in CATEGORIES)
        self.block1 = nn.Sequential(nn.Linear(NUMBERS + 4 * len(CATEGORIES), 24), nn.ReLU(), nn.Dropout(0.1))
        self.block2 = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(24, 3)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = [embed(categories[:, column]) for column, embed in enumerate(self.embeddings)]
        return self.head(self.block2(self.block1(torch.cat([numbers, *embedded], dim=1))))


def split_mixed(seed: int) -> Splits:
    world, rng = np.random.default_rng(0), np.random.default_rng([1, seed])
    numbers = rng.standard_normal((2400, NUMBERS))
    categories = np.stack([rng.integers(count, size=len(numbers)) for count in CATEGORIES], axis=1)
    # Weights of the numbers depend on class and first category; the other categories add to the score of a class.
    weights = world.standard_normal((CATEGORIES[0], NUMBERS, 3))
    score = np.einsum("nf,nfc->nc", numbers, weights[categories[:, 0]])
    for column in (1, 2):
        score += 1.5 * world.standard_normal((CATEGORIES[column], 3))[categories[:, column]]
    labels = (score + rng.gumbel(size=score.shape)).argmax(1)
    return split((floats(numbers), torch.from_numpy(categories)), torch.from_numpy(labels), seed, 300, 800)


class Ranker(nn.Module):
    """Two documents for one query, ``[B, 2, 16]``, to their scores ``[B, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.score = nn.Linear(16, 1)

    def forward(self, documents: Tensor) -> Tensor:
        return self.score(self.layers(documents)).squeeze(-1)


def split_ranking(seed: int) -> Splits:
    """Which of two documents was preferred; the cross-entropy of two scores is the pairwise logistic loss."""
    world, rng = np.random.default_rng(0), np.random.default_rng([1, seed])
    first, second = world.standard_normal((16, 24)) / 4, world.standard_normal(24)
    documents = rng.standard_normal((2600, 2, 16))
    usefulness = np.maximum(documents @ first, 0) @ second + 0.3 * rng.gumbel(size=documents.shape[:2])
    return split(floats(documents), torch.from_numpy(usefulness.argmax(1)), seed, 400, 700)


USERS, ITEMS = 150, 120


class Recommender(nn.Module):
    """Users and items, int64 ``[B]`` each, embedded and mixed by two layers, to ratings ``[B, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.mix = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.rate = nn.Linear(8, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.rate(self.mix(torch.cat([self.users(users), self.items(items)], dim=1)))


def split_ratings(seed: int) -> Splits:
    world, rng = np.random.default_rng(0), np.random.default_rng([1, seed])
    tastes, traits = world.standard_normal((USERS, 4)), world.standard_normal((ITEMS, 4))
    pairs = rng.permutation(USERS * ITEMS)[:6000]
    users, items = np.divmod(pairs, ITEMS)
    ratings = np.tanh((tastes @ traits.T)[users, items]) + 0.2 * rng.standard_normal(len(pairs))
    inputs = torch.from_numpy(users), torch.from_numpy(items)
    return split(inputs, floats(ratings[:, None]), seed, 700, 1300)


PROBLEMS = (
    Problem(
        name="mlp_breast_cancer",
        build=lambda: make_mlp(30, 16, 2),
        data=split_breast_cancer,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=40, batch_size=31, learning_rate=1e-3),
        slots={"1": ["mlp", "lowrank"], "3": ["mlp", "lowrank"]},
    ),
    Problem(
        name="mlp_diabetes",
        build=lambda: make_mlp(10, 16, 1),
        data=split_diabetes,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=50, batch_size=22, learning_rate=1e-3, optimizer="adamw", weight_decay=0.01),
        slots={"0": ["mlp", "lowrank", "norm"], "2": ["mlp", "lowrank", "norm"]},
    ),
    Problem(
        name="mlp_friedman",
        build=lambda: make_mlp(10, 12, 1),
        data=split_friedman,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=40, batch_size=40, learning_rate=3e-3),
        slots={"1": ["mlp", "mlp_wide", "lowrank"], "3": ["mlp", "mlp_wide", "lowrank"]},
    ),
    Problem(
        name="mlp_labels",
        build=lambda: make_mlp(30, 16, 8),
        data=split_labels,
        task="multi_label",
        loss=F.binary_cross_entropy_with_logits,
        recipe=Recipe(epochs=40, batch_size=40, learning_rate=2e-3),
        slots={"0": "auto", "2": "auto"},
    ),
    Problem(
        name="mixed_table",
        build=MixedTable,
        data=split_mixed,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=40, batch_size=50, learning_rate=2e-3, optimizer="adamw", weight_decay=0.01),
        slots={"block1": ["mlp", "lowrank"], "block2": ["mlp", "lowrank"]},
    ),
    Problem(
        name="ranker",
        build=Ranker,
        data=split_ranking,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=30, batch_size=50, learning_rate=3e-3),
        slots={"layers.1": ["mlp", "lowrank"], "layers.3": ["mlp", "lowrank"]},
    ),
    Problem(
        name="recommender",
        build=Recommender,
        data=split_ratings,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=25, batch_size=100, learning_rate=3e-3, optimizer="adamw", weight_decay=0.01),
        slots={"mix.1": ["mlp", "lowrank"], "mix.3": ["mlp", "lowrank"]},
    ),
)
