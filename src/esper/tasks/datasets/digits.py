"""Handwritten digits of 8 x 8 pixels, as shipped with scikit-learn."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from esper.tasks.datasets.dataset import Dataset
from esper.tasks.source import Source

SOURCE = Source("shipped with scikit-learn", Path(str(files("sklearn.datasets.data") / "digits.csv.gz")))


@cache
def digits() -> Dataset:
    """1797 examples of 64 pixels in their published order (later rows come from other writers), ten classes."""
    inputs, labels = cast("tuple[NDArray[np.float64], NDArray[np.int64]]", load_digits(return_X_y=True))
    return Dataset(inputs.astype(np.float32), labels.astype(np.int64))
