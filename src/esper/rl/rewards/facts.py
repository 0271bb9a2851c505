"""What a step led to, as far as anybody is paid for it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.stages import Stage

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

Family = Literal["accuracy", "loss"]
"""Unit of scores and contributions: accuracy, or the relative decrease of the loss."""
RentBasis = Literal["parameters", "flops"]
"""What rent is paid on."""


@dataclass(frozen=True)
class Worth:
    """What E networks achieve on validation data, 1 being perfection; of what was committed, in finished episodes."""

    score: Floats
    """Of the whole network, ``[E]``."""
    contribution: Floats
    """What the network would lose without the seed in a slot, ``[E, S]``; 0 without a blended seed. In finished
    episodes only fossils have one, measured among all seeds that were there."""


@dataclass(frozen=True)
class Moment:
    """E networks at one moment."""

    accuracy: Worth
    """In accuracy."""
    loss: Worth
    """In loss: 1 - loss / ln(classes), the relative decrease from guessing, which is 0."""
    parameter_rent: Floats
    """`rent_due` on the parameters of the seeds that count, ``[E]``."""
    flops_rent: Floats
    """The same on their FLOPs."""
    stage: NDArray[np.int8]
    """A `Stage` for each slot, ``[E, S]``."""
    alpha: Floats
    """``[E, S]``."""

    @classmethod
    def start(cls, environments: int, slots: int) -> Moment:
        """Before the first step: everything is 0, so that what telescopes adds up to what there is at the end."""
        row, table = np.zeros(environments), np.zeros((environments, slots))
        worth = Worth(row, table)
        return cls(worth, worth, row, row, np.full(table.shape, Stage.DORMANT, np.int8), table)

    def where(self, rows: Bools, other: Moment) -> Moment:
        """This moment in the networks ``rows``, bool ``[E]``, the other one in the rest."""
        mine, theirs = _arrays(self), _arrays(other)
        chosen = {
            name: np.where(rows.reshape(-1, *[1] * (array.ndim - 1)), array, theirs[name])
            for name, array in mine.items()
        }
        accuracy = Worth(chosen.pop("accuracy.score"), chosen.pop("accuracy.contribution"))
        loss = Worth(chosen.pop("loss.score"), chosen.pop("loss.contribution"))
        return Moment(accuracy, loss, **chosen)


@dataclass(frozen=True)
class Standing:
    """What counts of a moment for one way to pay: one unit of scores, one kind of rent."""

    score: Floats
    """``[E]``, as in `Worth`."""
    contribution: Floats
    """``[E, S]``, as in `Worth`."""
    rent: Floats
    """``[E]``."""
    stage: NDArray[np.int8]
    """``[E, S]``."""
    alpha: Floats
    """``[E, S]``."""


@dataclass(frozen=True)
class Step:
    """One step of E networks, for one way to pay."""

    before: Standing
    after: Standing
    finished: Bools
    acted: Bools
    pruned_age: NDArray[np.int64]


@dataclass(frozen=True)
class Facts:
    """One step of E networks."""

    before: Moment
    after: Moment
    finished: Bools
    """Whether this was the episode's last step, ``[E]``."""
    acted: Bools
    """Whether the controller did anything but wait, ``[E]``."""
    pruned_age: NDArray[np.int64]
    """Steps since germination of the seed that the controller had pruned, ``[E]``; -1 if it had none."""

    def step(self, family: Family, rent_on: RentBasis) -> Step:
        """The facts that count for one way to pay."""
        before, after = (_standing(moment, family, rent_on) for moment in (self.before, self.after))
        return Step(before, after, self.finished, self.acted, self.pruned_age)


def _standing(moment: Moment, family: Family, rent_on: RentBasis) -> Standing:
    worth = moment.accuracy if family == "accuracy" else moment.loss
    rent = moment.parameter_rent if rent_on == "parameters" else moment.flops_rent
    return Standing(worth.score, worth.contribution, rent, moment.stage, moment.alpha)


def rent_due(added: Floats, host: Floats, rent: Floats) -> Floats:
    """``rent * log1p(added / host)``; all ``[E]``, added and host in parameters or in FLOPs."""
    return rent * np.log1p(added / host)


def _arrays(moment: Moment) -> dict[str, NDArray[np.generic]]:
    arrays: dict[str, NDArray[np.generic]] = {}
    for field in fields(moment):
        value = vars(moment)[field.name]
        if isinstance(value, Worth):
            arrays |= {f"{field.name}.{name}": part for name, part in vars(value).items()}
        else:
            arrays[field.name] = value
    return arrays
