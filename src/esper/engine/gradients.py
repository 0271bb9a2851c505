"""Gradient health: how the gradients of modules compare with those of what already counts, the incumbents.

Gradients are compared as root mean squares per parameter, so neither sizes nor a factor of the loss matter. Where a
network learns well they have much the same scale everywhere (Glorot and Bengio 2010, section 4.2); they vanish or
explode where they are orders of magnitude smaller or larger (Pascanu, Mikolov and Bengio 2013, section 2).

`assess_health` compares them over the minibatches of a decision, `update_gradient_health` keeps exponential means
over decisions and says which are healthy. Gate G2, observations and events read what it returns, for both backends.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from esper.config.settings import Settings
from esper.lifecycle.table import SeedMeasurements
from esper.numerics.arrays import Bools, Floats, Ints, replace_where


class GradientHealthSettings(Settings):
    """When the gradient of a seed is healthy: it neither vanishes nor explodes in too many minibatches.

    Gate G2 requires it, and controllers observe it. The ratio is the seed's gradient over that of host and fossils,
    each as a root mean square per parameter.
    """

    vanished_ratio: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Ratio below which a gradient has vanished; a zero gradient always has. On the token suite, where seeds learn,
    ratios are between 0.004 and 16."""
    exploded_ratio: float = Field(default=1e2, gt=0, allow_inf_nan=False)
    """Ratio above which a gradient has exploded; one that is not finite always has. For comparison, clipping starts at
    up to ten times the usual norm (Pascanu et al. 2013)."""
    max_share: float = Field(default=0.5, ge=0, lt=1)
    """Maximum fraction of minibatches with a vanished gradient, and maximum fraction with an exploded one, for a
    healthy seed; both are exponential means over decisions."""
    decay: float = Field(default=0.5, ge=0, lt=1)
    """Weight of a decision in these means relative to the next one; 0: only the newest decision counts."""

    @model_validator(mode="after")
    def _require_order(self) -> Self:
        if self.vanished_ratio >= self.exploded_ratio:
            raise ValueError(
                f"no gradient is healthy: it vanishes below {self.vanished_ratio:g} and explodes above "
                f"{self.exploded_ratio:g}; lower vanished_ratio or raise exploded_ratio"
            )
        return self


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
    """Fraction of the minibatches in which the ratio was below `vanished_ratio` or no gradient arrived."""
    exploded: Floats
    """Fraction in which the ratio was above `exploded_ratio` or the gradient was not finite."""
    ratio: Floats
    """Root mean square per parameter of the module's gradient over that of the incumbents'.

    Mean over the minibatches in which the former was finite and the latter finite and not zero; NaN without any.
    """

    @classmethod
    def none(cls, *shape: int) -> Self:
        """The table of modules that do not learn: 0 everywhere, and NaN as ratio."""
        zeros = np.zeros(shape)
        return cls(np.zeros(shape, np.int64), zeros, zeros.copy(), zeros.copy(), np.full(shape, np.nan))


def assess_health(
    hosts: Floats,
    seeds: Floats,
    *,
    host_parameters: Ints,
    seed_parameters: Ints,
    fossils: Bools,
    learning: Bools,
    settings: GradientHealthSettings,
) -> HealthTable:
    """The gradient health of the modules of E networks in T minibatches, from norms of gradients.

    The incumbents of a network are its host and its fossils; fossils themselves are compared with all of them.

    Args:
        hosts: ``[T, E]``.
        seeds: ``[T, E, S]``; 0 in empty slots.
        host_parameters: Numbers of parameters ``[E]``.
        seed_parameters: ``[E, S]``.
        fossils: Slots with a fossilized module, ``[E, S]``.
        learning: Slots with a module that learns, ``[E, S]``; the others get the entries of `HealthTable.none`.
        settings: The ratios at which gradients have vanished or exploded.
    """
    # Root mean squares per parameter, of the modules [T, E, S] and of the incumbents [T, E, 1].
    incumbents = np.sqrt(hosts**2 + np.where(fossils, seeds**2, 0.0).sum(2))[..., None]
    incumbent_parameters = (host_parameters + (seed_parameters * fossils).sum(1))[:, None]
    own = seeds / np.sqrt(np.maximum(seed_parameters, 1))
    scale = incumbents / np.sqrt(np.maximum(incumbent_parameters, 1))
    usable = np.isfinite(scale) & (scale > 0)
    with np.errstate(over="ignore"):
        ratio = own / np.where(usable, scale, np.nan)
    vanished = (seeds == 0) | (ratio < settings.vanished_ratio)
    exploded = ~np.isfinite(seeds) | (ratio > settings.exploded_ratio)

    # Means over the minibatches; the ratio's over those in which it is known.
    comparable = np.isfinite(ratio)
    count: Ints = comparable.sum(0)
    total = np.where(comparable, ratio, 0.0).sum(0)
    mean_ratio = np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)
    minibatches = np.full(count.shape, len(seeds))
    health = HealthTable(minibatches, seeds.mean(0), vanished.mean(0), exploded.mean(0), mean_ratio)
    return replace_where(learning, HealthTable.none(*seed_parameters.shape), health)


def update_gradient_health(
    measurements: SeedMeasurements, health: HealthTable, settings: GradientHealthSettings
) -> SeedMeasurements:
    """The measurements with one more decision in their means, and whether gradients are healthy by them.

    With shares s_1 .. s_n of the decisions at which a seed's gradient was measured, a mean is
    ``sum_i decay^(n - i) s_i / sum_i decay^(n - i)``: the first decision counts no more than its age says.

    Args:
        measurements: Before the decision, ``[E, S]``.
        health: The gradients in its minibatches, ``[E, S]``; means of modules that did not learn stay as they are.
        settings: The decay of the means, and their bound.
    """
    measured = health.minibatches > 0
    weight = np.where(measured, settings.decay * measurements.gradient_weight + 1, measurements.gradient_weight)
    gain = measured / np.maximum(weight, 1)
    vanished = measurements.vanished_share + gain * (health.vanished - measurements.vanished_share)
    exploded = measurements.exploded_share + gain * (health.exploded - measurements.exploded_share)
    healthy = (weight > 0) & (np.maximum(vanished, exploded) <= settings.max_share)
    return replace(
        measurements,
        gradient_healthy=healthy,
        vanished_share=vanished,
        exploded_share=exploded,
        gradient_weight=weight,
    )
