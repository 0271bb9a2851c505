"""Data that several models share: digits, drawn shapes, photographs and a text, none of which needs a network."""

from __future__ import annotations

from functools import cache
from pydoc_data import topics

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

from foreign_models.problem import Splits, floats, split

SHAPES = ("disc", "square", "cross", "ring", "stripes")
SIDE = 20
"""Pixels of a drawn image."""


def split_digits(seed: int) -> Splits:
    """Images ``[N, 1, 8, 8]`` of digits with values from 0 to 1: 1000 for training."""
    bunch = load_digits()
    return split(floats(bunch.images[:, None] / 16), torch.from_numpy(bunch.target).long(), seed, 300, 497)


def draw_shapes(count: int, noise: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images ``[N, 1, 20, 20]`` of one noisy shape, its class ``[N]``, and the class of each pixel, 0 outside."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(len(SHAPES), size=count)
    radius = rng.uniform(3, 6, (count, 1, 1))
    centre = rng.uniform(6, SIDE - 6, (2, count, 1, 1))
    contrast = rng.uniform(0.5, 1.5, (count, 1, 1)) * rng.choice([-1, 1], (count, 1, 1))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    down, right = np.abs(rows - centre[0]), np.abs(columns - centre[1])
    distance, extent = np.hypot(down, right), np.maximum(down, right)
    inside = [
        distance <= radius,
        extent <= 0.85 * radius,
        (extent <= radius) & (np.minimum(down, right) <= 1),
        (distance <= radius) & (distance > radius - 2),
        (extent <= radius) & ((rows + columns) % 4 < 2),
    ]
    mask = np.choose(kind[:, None, None], inside)
    images = contrast * mask + noise * rng.standard_normal(mask.shape)
    labels = torch.from_numpy(kind)
    return floats(images[:, None]), labels, torch.from_numpy(np.where(mask, kind[:, None, None] + 1, 0))


def split_shapes(seed: int) -> Splits:
    """Which shape is in an image: 1000 for training."""
    images, labels, _ = draw_shapes(2200, 0.5, seed)
    return split(images, labels, seed, 400, 800)


@cache
def read_photographs() -> NDArray[np.float32]:
    """Two photographs in grey, ``[2, 427, 640]``, from 0 to 1."""
    return np.stack(load_sample_images().images).mean(-1, dtype=np.float32) / 255


def cut_patches(count: int, side: int, seed: int) -> Tensor:
    """Random square patches of the photographs, ``[N, 1, side, side]``."""
    photographs, rng = read_photographs(), np.random.default_rng(seed)
    which, top, left = (
        rng.integers(limit, size=count)[:, None, None]
        for limit in (len(photographs), photographs.shape[1] - side, photographs.shape[2] - side)
    )
    rows, columns = np.mgrid[:side, :side]
    return floats(photographs[which, top + rows, left + columns][:, None])


@cache
def read_help() -> tuple[Tensor, int]:
    """The two longest pages of Python's help as indices into their alphabet, int64 ``[N]``, and the size of that."""
    pages = sorted(topics.topics.values(), key=len)[-2:]
    alphabet, tokens = np.unique(np.array(list("\n".join(pages))), return_inverse=True)
    return torch.from_numpy(tokens.astype(np.int64)), len(alphabet)


def split_help(seed: int, window: int) -> Splits:
    """Stretches of the text with the character that follows each of their characters, int64 ``[N, window]``."""
    tokens, _ = read_help()
    stretches = tokens[: (len(tokens) - 1) // window * window].view(-1, window)
    following = tokens[1 : stretches.numel() + 1].view(-1, window)
    return split(stretches, following, seed, 300, 600)
