"""Stages of slots, the state of every slot of E networks, and the measurements and ratings of their seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.actions import Rows
from esper.numerics.arrays import Bools, Float32s, Floats, Int8s, Int16s, map_arrays, replace_where


class Stage(IntEnum):
    """The stage of a slot. A seed lives from GERMINATED until it is FOSSILIZED or PRUNED."""

    DORMANT = 0
    """Empty: a seed may germinate here."""
    GERMINATED = 1
    """The seed is new and is probed; it does not count in the forward pass yet."""
    TRAINING = 2
    """The seed learns in isolation (isolation ``shadow`` only)."""
    BLENDING = 3
    """The seed counts with a weight alpha that moves."""
    HOLDING = 4
    """The seed counts with a steady alpha."""
    FOSSILIZED = 5
    """The seed is part of the host for good."""
    PRUNED = 6
    """The seed was removed; first stage of the cooldown."""
    EMBARGOED = 7
    """Nothing may germinate here for a while."""
    RESETTING = 8
    """Last stage of the cooldown, before DORMANT."""


LIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
"""Stages of an unfinished seed: it can still be pruned."""
OWNING = (*LIVE, Stage.FOSSILIZED)
"""Stages in which the slot owns parameters."""
BLENDED = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
"""Stages in which alpha counts in the forward pass."""
COOLDOWN = (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""Stages between the removal of a seed and the next DORMANT, in order."""


def make_stage_lookup(stages: tuple[Stage, ...]) -> Bools:
    """Lookup table ``bool [9]``: indexed with an array of stages, it is whether they are among ``stages``."""
    return np.isin(np.arange(len(Stage)), stages)


NO_BLUEPRINT = -1

_LIVE, _OWNING, _BLENDED = map(make_stage_lookup, (LIVE, OWNING, BLENDED))


@dataclass(frozen=True)
class SeedTable:
    """The slots of E environments as a struct of arrays ``[E, S]``. Never mutated: changes make a new table.

    Ages include the present step: a slot has age 1 in the step in which it entered its stage. They stop at the largest
    int16. A slot without a seed has the values of `dormant` in everything but its stage and its age.
    """

    stage: Int8s
    """A `Stage`."""
    stage_age: Int16s
    """Steps in this stage."""
    seed_age: Int16s
    """Steps since germination; 0 without a seed."""
    blueprint: Int16s
    """Index of the resident seed's blueprint; -1 without a seed."""
    blend: Int8s
    """The resident seed's `Blend`, which never changes."""
    alpha: Float32s
    """The weight of the seed in this step."""
    alpha_start: Float32s
    """Alpha at the start of its present ramp."""
    alpha_target: Float32s
    """Alpha at the end of its present ramp."""
    alpha_elapsed: Int16s
    """Steps taken of the `alpha_duration` of the ramp."""
    alpha_duration: Int16s
    """Steps of the ramp; a change at once is a ramp of 1 step."""
    alpha_curve: Int8s
    """A `Curve`."""
    pruning: Bools
    """Whether the seed is ramping down to be pruned; only in BLENDING."""

    @classmethod
    def dormant(cls, environments: int, slots: int) -> Self:
        """A table of empty slots with age 0."""
        shape = (environments, slots)
        byte, number, share = np.zeros(shape, np.int8), np.zeros(shape, np.int16), np.zeros(shape, np.float32)
        nothing = cls(
            stage=np.full(shape, Stage.DORMANT, np.int8),
            stage_age=number,
            seed_age=number,
            blueprint=np.full(shape, NO_BLUEPRINT, np.int16),
            blend=byte,
            alpha=share,
            alpha_start=share,
            alpha_target=share,
            alpha_elapsed=number,
            alpha_duration=number,
            alpha_curve=byte,
            pruning=np.zeros(shape, np.bool_),
        )
        return nothing.copy()

    @property
    def environments(self) -> int:
        """E."""
        return self.stage.shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.stage.shape[1]

    @property
    def live(self) -> Bools:
        """``[E, S]``: slots with an unfinished seed."""
        return _LIVE[self.stage]

    @property
    def owning(self) -> Bools:
        """``[E, S]``: slots that own parameters."""
        return _OWNING[self.stage]

    @property
    def blended(self) -> Bools:
        """``[E, S]``: slots whose alpha counts in the forward pass."""
        return _BLENDED[self.stage]

    @property
    def arrived(self) -> Bools:
        """``[E, S]``: slots whose alpha is at its target."""
        return self.alpha_elapsed >= self.alpha_duration

    def copy(self) -> Self:
        """A copy that shares no memory."""
        return map_arrays(np.copy, self)

    def rows(self, index: Rows) -> Self:
        """The table of the environments that ``index`` selects (a slice, indices, or a mask over environments)."""
        return map_arrays(lambda array: array[index], self)

    def reset(self, rows: Bools) -> Self:
        """The table with all slots of the environments ``rows``, bool ``[E]``, as in `dormant`."""
        return replace_where(rows, self, self.dormant(*self.stage.shape))


@dataclass(frozen=True)
class SeedMeasurements:
    """Measurements of the seeds before a decision, ``[E, S]`` each."""

    probed: Bools
    """Whether the new seed was probed, and its output and gradient were finite."""
    gradient_healthy: Bools
    """Whether the seed's gradient was measured, and neither vanished nor exploded in too many minibatches."""
    vanished_share: Floats
    """Share of minibatches in which the seed's gradient vanished: an exponential mean over its decisions."""
    exploded_share: Floats
    """Share of minibatches in which it exploded: an exponential mean, too."""
    gradient_weight: Floats
    """Sum of the weights of the decisions in these means; 0 if the gradient was never measured."""
    contribution: Float32s
    """Accuracy points lost when the seed is switched off; NaN if never measured."""
    contribution_age: Int16s
    """Steps since the contribution was measured."""

    @classmethod
    def none(cls, environments: int, slots: int) -> Self:
        """Nothing is measured yet."""
        shape = (environments, slots)
        return cls(
            probed=np.zeros(shape, np.bool_),
            gradient_healthy=np.zeros(shape, np.bool_),
            vanished_share=np.zeros(shape),
            exploded_share=np.zeros(shape),
            gradient_weight=np.zeros(shape),
            contribution=np.full(shape, np.nan, np.float32),
            contribution_age=np.zeros(shape, np.int16),
        )

    def without(self, slots: Bools) -> Self:
        """The measurements with those of ``slots`` reset, whose seeds were removed or are new.

        ``slots`` selects single slots, bool ``[E, S]``, or all those of some networks, bool ``[E]``.
        """
        return replace_where(slots, self, self.none(*self.probed.shape))


Figures: TypeAlias = NDArray[np.floating[Any]]
"""Numbers of any precision."""
Values_co = TypeVar("Values_co", covariant=True)


@dataclass(frozen=True)
class SeedRating(Generic[Values_co]):
    """What seeds are worth and must be worth to be kept: the numbers of one seed, or `Figures` ``[E, S]`` of many.

    By the score a seed must be worth its price; by the loss, the finer measure, it must be better than nothing beyond
    noise. Unknown numbers are None, and NaN in arrays.
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
