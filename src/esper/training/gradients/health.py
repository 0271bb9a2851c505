"""How seeds' gradients compare with those of what already counts in their network, the incumbents.

Gradients are compared as root mean squares per parameter, so neither the sizes of seed and network nor a factor of the
loss matters. In a network that learns well, gradients have much the same scale everywhere (Glorot and Bengio 2010,
section 4.2); they vanish or explode where they are orders of magnitude smaller or larger (Pascanu, Mikolov and Bengio
2013, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

VANISHED = 1e-3
"""A seed's gradient vanishes where its ratio to the incumbents' is less.

On the token suite, where seeds learn, means over a decision's minibatches lie between .004 and 9.
"""
EXPLODED = 1e2
"""It explodes where the ratio is greater. Clipping sets in at up to ten times the usual norm (Pascanu et al.)."""


@dataclass(frozen=True)
class SeedHealth:
    """The gradients of one seed since the last decision, each as it was before any clipping.

    A minibatch is what one step of the optimizer learns from: where a loop of your own adds up gradients over several
    backward passes, their sum; where it scales its losses, the gradient without that; in several processes, the first
    one's own gradient, before it is averaged.
    """

    minibatches: int
    """How many there were; 0 for a seed that does not learn."""
    norm: float
    """Mean over the minibatches; not finite if it was so in one."""
    vanished: float
    """Fraction of the minibatches in which the ratio was below `VANISHED` or no gradient arrived."""
    exploded: float
    """Fraction in which the ratio was above `EXPLODED` or the gradient was not finite."""
    ratio: float
    """Root mean square per parameter of the seed's gradient over that of the incumbents'.

    Mean over the minibatches in which the former was finite and the latter finite and not zero; NaN without any.
    """


@dataclass(frozen=True)
class HealthTable:
    """The fields of `SeedHealth` for many seeds, each an array ``[..., S]``."""

    minibatches: NDArray[np.int64]
    norm: Floats
    vanished: Floats
    exploded: Floats
    ratio: Floats

    @classmethod
    def none(cls, *shape: int) -> Self:
        """No seed learns: 0 everywhere, and NaN as ratio."""
        zeros = np.zeros(shape)
        return cls(np.zeros(shape, np.int64), zeros, zeros.copy(), zeros.copy(), np.full(shape, np.nan))

    def updated(self, places: NDArray[np.bool_], newer: HealthTable) -> HealthTable:
        """This table with ``places``, a mask that fits ``[..., S]``, as in a newer one."""
        return HealthTable(
            np.where(places, newer.minibatches, self.minibatches),
            np.where(places, newer.norm, self.norm),
            np.where(places, newer.vanished, self.vanished),
            np.where(places, newer.exploded, self.exploded),
            np.where(places, newer.ratio, self.ratio),
        )

    def at(self, *place: int) -> SeedHealth:
        """One seed's."""
        return SeedHealth(
            int(self.minibatches[place]),
            float(self.norm[place]),
            float(self.vanished[place]),
            float(self.exploded[place]),
            float(self.ratio[place]),
        )


@dataclass(frozen=True)
class GradientNorms:
    """Norms of gradients in T minibatches, at least one."""

    values: Floats
    """``[T, ...]``."""
    parameters: NDArray[np.int64]
    """How many parameters each gradient is of, ``[...]``."""

    @property
    def root_mean_squares(self) -> Floats:
        """Per parameter, ``[T, ...]``."""
        return self.values / np.sqrt(np.maximum(self.parameters, 1))


def judged(seeds: GradientNorms, incumbents: GradientNorms) -> HealthTable:
    """The health of seeds, ``[..., S]``, from norms ``[T, ..., S]`` and those of their incumbents, ``[T, ..., 1]``."""
    scale = incumbents.root_mean_squares
    known = np.isfinite(scale) & (scale > 0)
    with np.errstate(over="ignore"):
        ratio = seeds.root_mean_squares / np.where(known, scale, np.nan)
    vanished = (seeds.values == 0) | (ratio < VANISHED)
    exploded = ~np.isfinite(seeds.values) | (ratio > EXPLODED)
    compared = np.isfinite(ratio)
    count: NDArray[np.int64] = compared.sum(0)
    total = np.where(compared, ratio, 0.0).sum(0)
    return HealthTable(
        np.full(count.shape, len(ratio)),
        seeds.values.mean(0),
        vanished.mean(0),
        exploded.mean(0),
        np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0),
    )
