"""Gradient health: how the gradients of modules on trial compare with those of what already counts, the incumbents.

Gradients are compared as root mean squares per parameter, so neither the sizes of module and network nor a factor of
the loss matters. In a network that learns well, gradients have much the same scale everywhere (Glorot and Bengio 2010,
section 4.2); they vanish or explode where they are orders of magnitude smaller or larger (Pascanu, Mikolov and Bengio
2013, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from esper.numerics.arrays import Bools, Floats, Ints, replace_where

VANISHED = 1e-3
"""Ratio to the incumbents below which a module's gradient has vanished.

On the token suite, where modules learn, means over a decision's minibatches lie between .004 and 9.
"""
EXPLODED = 1e2
"""Ratio above which it has exploded. Clipping sets in at up to ten times the usual norm (Pascanu et al.)."""


@dataclass(frozen=True)
class HealthTable:
    """Gradients of many modules since the last decision, before any clipping; each array is ``[..., S]``.

    A minibatch is what one step of the optimizer learns from. In a training loop that accumulates gradients it is their
    sum; where losses are scaled, the unscaled gradient; in several processes, the first one's own, before averaging.
    """

    minibatches: Ints
    """Number of minibatches; 0 for a module that does not learn."""
    norm: Floats
    """Mean norm over the minibatches; not finite if it was so in one of them."""
    vanished: Floats
    """Fraction of the minibatches in which the ratio was below `VANISHED` or no gradient arrived."""
    exploded: Floats
    """Fraction in which the ratio was above `EXPLODED` or the gradient was not finite."""
    ratio: Floats
    """Root mean square per parameter of the module's gradient over that of the incumbents'.

    Mean over the minibatches in which the former was finite and the latter finite and not zero; NaN without any.
    """

    @classmethod
    def none(cls, *shape: int) -> Self:
        """The table of modules that do not learn: 0 everywhere, and NaN as ratio."""
        zeros = np.zeros(shape)
        return cls(np.zeros(shape, np.int64), zeros, zeros.copy(), zeros.copy(), np.full(shape, np.nan))


@dataclass(frozen=True)
class GradientNorms:
    """Norms of gradients in T minibatches, at least one."""

    values: Floats
    """``[T, ...]``."""
    parameters: Ints
    """Number of parameters of each gradient, ``[...]``."""

    @property
    def root_mean_squares(self) -> Floats:
        """Per parameter, ``[T, ...]``."""
        return self.values / np.sqrt(np.maximum(self.parameters, 1))


def assess_health(
    hosts: Floats, seeds: Floats, *, host_parameters: Ints, seed_parameters: Ints, fossils: Bools, learning: Bools
) -> HealthTable:
    """The gradient health of the modules of E networks in T minibatches.

    The incumbents of a network are its host and its fossils; fossils themselves are compared with all of them.

    Args:
        hosts: Norms of the hosts' gradients, ``[T, E]``.
        seeds: Norms of the modules' gradients, ``[T, E, S]``; 0 in empty slots.
        host_parameters: ``[E]``.
        seed_parameters: ``[E, S]``.
        fossils: Slots with a fossilized module, ``[E, S]``.
        learning: Slots with a module that learns, ``[E, S]``; the others get the entries of `HealthTable.none`.
    """
    incumbent_norms = np.sqrt(hosts**2 + np.where(fossils, seeds**2, 0.0).sum(2))[..., None]
    incumbent_parameters = (host_parameters + (seed_parameters * fossils).sum(1))[:, None]
    health = compare_gradients(
        GradientNorms(seeds, seed_parameters), GradientNorms(incumbent_norms, incumbent_parameters)
    )
    return replace_where(learning, HealthTable.none(*seed_parameters.shape), health)


def compare_gradients(seeds: GradientNorms, incumbents: GradientNorms) -> HealthTable:
    """The health of modules, ``[..., S]``, from norms ``[T, ..., S]`` and their incumbents' ``[T, ..., 1]``."""
    scale = incumbents.root_mean_squares
    usable = np.isfinite(scale) & (scale > 0)
    with np.errstate(over="ignore"):
        ratio = seeds.root_mean_squares / np.where(usable, scale, np.nan)
    vanished = (seeds.values == 0) | (ratio < VANISHED)
    exploded = ~np.isfinite(seeds.values) | (ratio > EXPLODED)
    comparable = np.isfinite(ratio)
    count: Ints = comparable.sum(0)
    total = np.where(comparable, ratio, 0.0).sum(0)
    return HealthTable(
        np.full(count.shape, len(ratio)),
        seeds.values.mean(0),
        vanished.mean(0),
        exploded.mean(0),
        np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0),
    )
