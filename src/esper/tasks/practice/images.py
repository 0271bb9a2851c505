"""Splits of labelled arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.data import Labels, Scale
from esper.tasks.practice.examples import Labelled, Splits
from esper.tasks.streams import stream

SPLIT_SEED = 0
"""The split belongs to the task: every run has the same."""
MEASURED = 10_000
"""Training examples that mean and deviation are taken from."""

Inputs = NDArray[Any]
"""``[N, ...]``, of any number type."""


def split(pool: tuple[Inputs, Labels], test: tuple[Inputs, Labels], validation: int, classes: int) -> Splits:
    """``validation`` random examples of ``pool`` are for the controller, the others for training."""
    inputs, labels = pool
    order = stream(SPLIT_SEED).permutation(len(labels))
    held, learned = np.sort(order[:validation]), np.sort(order[validation:])
    scale = Scale.of(inputs[learned[:MEASURED]].astype(np.float32))
    return Splits(
        _labelled(inputs[learned], labels[learned], scale),
        _labelled(inputs[held], labels[held], scale),
        _labelled(*test, scale),
        classes,
    )


def _labelled(inputs: Inputs, labels: Labels, scale: Scale) -> Labelled:
    return Labelled(torch.from_numpy(inputs.copy()), torch.from_numpy(labels.astype(np.int64)), scale)
