"""Means over validation examples that keep the value of each example, so that differences of them have an error."""

from __future__ import annotations

import math
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from esper.numerics.arrays import Floats

UNKNOWN = math.nan


class ExampleMean(float):
    """The mean of one value per example, a float that keeps these values.

    Args:
        examples: The values, ``[N]``, N at least 1.
    """

    examples: Floats
    """The values, ``[N]``."""

    def __new__(cls, examples: Floats) -> Self:
        mean = super().__new__(cls, np.mean(examples))
        mean.examples = examples
        return mean

    def __getnewargs__(self) -> tuple[Any, ...]:
        # Measurements are sent between processes.
        return (self.examples,)

    @classmethod
    def read(cls, value: object) -> Self | None:
        """The mean of a tensor or array ``[N]`` of real numbers or truth values; None for anything else.

        A tensor with a single value is a number and not a mean: nothing is known of its error.
        """
        if isinstance(value, Tensor) and not value.is_complex() and value.layout is torch.strided:
            value = value.detach().to("cpu", torch.float64).numpy()
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.size < 2:
            return None
        values = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return cls(values.astype(np.float64)) if values.dtype.kind in "biuf" else None


def compute_difference_error(value: float, other: float, share: float = 0.0) -> float:
    """The standard error of ``(other - value) - share * other`` over examples; NaN unless both keep their examples.

    Both are of the same N examples, so this is the error of the mean of N differences. With the ``share`` that is the
    ratio ``(other - value) / other`` itself, and divided by ``|other|``, it is the error of that ratio by the delta
    method (Cochran, *Sampling Techniques*, 1977, section 6.3).
    """
    if not isinstance(value, ExampleMean) or not isinstance(other, ExampleMean):
        return UNKNOWN
    if len(value.examples) != len(other.examples):
        return UNKNOWN
    residuals = (1 - share) * other.examples - value.examples
    return float(residuals.std(ddof=1)) / math.sqrt(len(residuals))
