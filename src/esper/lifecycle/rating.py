"""What seeds are worth, and what they must be worth to be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from esper.numerics.arrays import Bools

Figures: TypeAlias = NDArray[np.floating[Any]]
"""Numbers of any precision."""
Values_co = TypeVar("Values_co", covariant=True)


@dataclass(frozen=True)
class SeedRating(Generic[Values_co]):
    """What seeds are worth and must be worth to be kept: the numbers of one seed, or `Figures` ``[E, S]`` of many.

    Two conditions decide. By the score a seed must be worth its price; by the loss, the finer measure of the two, it
    must be better than nothing beyond noise. Unknown numbers are None, and NaN in arrays.
    """

    contribution: Values_co
    """Contribution to the score; unknown if not measured, as for a module that does not affect the output yet."""
    error: Values_co
    """Standard error of the contribution."""
    price: Values_co
    """The seed's part of the rent, in units of the score."""
    threshold: Values_co
    """Contribution from which the seed is kept, its price included; unknown without a threshold, as with a trained
    policy."""
    loss_gain: Values_co
    """Rise of the validation loss without the seed, as a share of the loss with it."""
    loss_error: Values_co
    """Standard error of ``loss_gain``; 0 or unknown if it was not measured."""
    loss_threshold: Values_co
    """``loss_gain`` from which the seed is kept; unknown if only the score decides."""
    note: str = ""
    """Another reason for the outcome, such as that the module did not affect the output yet; usually empty."""

    def select(self: SeedRating[Figures], network: int, slot: int, note: str = "") -> SeedRating[float | None]:
        """The rating of one seed."""
        names = [field.name for field in fields(self) if field.name != "note"]
        values = {name: float(getattr(self, name)[network, slot]) for name in names}
        return SeedRating(**{name: None if math.isnan(value) else value for name, value in values.items()}, note=note)

    @property
    def worth_keeping(self: SeedRating[Figures]) -> Bools:
        """Whether seeds reach both thresholds, ``[E, S]``; False where a contribution was not measured."""
        return (self.contribution >= self.threshold) & ~(self.loss_gain < self.loss_threshold)

    def __str__(self) -> str:
        """``contribution +0.016 ± 0.004, rent 0, minimum 0; loss 1.2% ± 0.3% higher without it, minimum 0.3%``."""
        if isinstance(self.price, np.ndarray):
            return repr(self)
        one = cast("SeedRating[float | None]", self)
        if one.contribution is None:
            return self.note or "contribution not measured"
        error = "" if one.error is None else f" ± {one.error:.2g}"
        minimum = "" if one.threshold is None else f", minimum {format_signed(one.threshold)}"
        loss = ""
        if one.loss_gain is not None and one.loss_threshold is not None:
            loss_error = "" if one.loss_error is None else f" ± {one.loss_error:.2%}"
            direction = "higher" if one.loss_gain >= 0 else "lower"
            loss = (
                f"; loss {abs(one.loss_gain):.2%}{loss_error} {direction} without it, minimum {one.loss_threshold:.2%}"
            )
        note = f"; {self.note}" if self.note else ""
        return f"contribution {format_signed(one.contribution)}{error}, rent {one.price:.3g}{minimum}{loss}{note}"


def format_signed(value: float) -> str:
    """Three digits with a sign: ``+0.016``; zero has none."""
    return f"{value:+.3g}" if value else "0"
