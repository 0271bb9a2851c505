"""The detectors of trouble: what is wrong with a network, and whether its state is worth keeping."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from esper.config.settings import Settings
from esper.numerics.arrays import Bools, Floats, Int8s, Ints
from esper.serialization.state_files import from_plain, to_plain


class GovernorSettings(Settings):
    """Parameters of the detectors of trouble. A *check* is one look at a network: in a population, one decision.

    Skill is 0 for guessing and 1 for perfection: ``(accuracy - chance) / (1 - chance)``.
    """

    window: int = Field(default=8, ge=2, le=1000)
    """Checks whose losses make up what is usual."""
    fewest: int = Field(default=3, ge=2, le=1000)
    """Losses that must be known before one can be unusual; at most the window."""
    sigmas: float = Field(default=4.0, gt=0)
    """A loss is unusual beyond the mean plus this many standard deviations of the window ..."""
    multiple: float = Field(default=2.0, gt=1)
    """... and beyond this multiple of the mean."""
    patience: int = Field(default=3, ge=1, le=1000)
    """Checks in a row with an unusual loss, or at the level of guessing, before a network is in trouble; what is not
    finite is trouble at once."""
    good_sigmas: float = Field(default=1.0, ge=0)
    """Vitals are good, and a snapshot is taken, up to the mean plus this many standard deviations."""
    lead: float = Field(default=0.25, gt=0, le=1)
    """Skill that a network must have had before it can collapse."""
    collapsed: float = Field(default=0.05, ge=0, lt=1)
    """Skill at or below which it then counts as guessing."""
    max_rollbacks: int = Field(default=3, ge=0)
    """Rollbacks in one episode. Trouble after the last one ends the episode, in the state of the last snapshot."""
    penalty: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """What each trouble costs in reward, in units of the objective."""

    @model_validator(mode="after")
    def _losses_become_known(self) -> Self:
        if self.fewest > self.window:
            raise ValueError(
                f"no loss can ever be unusual: {self.fewest} must be known, but a window holds {self.window}; "
                "lower fewest or raise window"
            )
        return self


class Trouble(IntEnum):
    """Why a network is rolled back; NONE, which is falsy, where it is not."""

    NONE = 0
    NOT_FINITE = 1
    """A loss, gradient, parameter or moment of the optimizer is infinite or not a number."""
    COLLAPSED = 2
    """The network guesses, and did better before."""
    EXPLODED = 3
    """The loss has been far above the usual for several checks in a row."""


@dataclass(frozen=True)
class Vitals:
    """What one check of E networks found; all ``[E]``."""

    loss: Floats
    """The training loss."""
    skill: Floats
    """0 for guessing, 1 for perfection; NaN where unknown."""
    finite: Bools
    """Whether losses, gradients, parameters and moments are all finite."""


@dataclass(frozen=True)
class Assessment:
    """What a check says of E networks; all ``[E]``."""

    trouble: Int8s
    """A `Trouble`."""
    usual: Bools
    """Whether there is neither trouble nor what becomes trouble if it lasts."""
    good: Bools
    """Whether the state is worth a snapshot."""


def skill(accuracy: Floats, classes: int) -> Floats:
    """``(accuracy - chance) / (1 - chance)`` with the chance of guessing right, 1 / classes."""
    chance = 1 / classes
    return (accuracy - chance) / (1 - chance)


class Monitor:
    """Watches the vitals of E networks over time, each for itself."""

    def __init__(self, settings: GovernorSettings, networks: int) -> None:
        self._settings = settings
        self._losses: Floats = np.full((networks, settings.window), np.nan)
        """Losses that were not unusual, the newest first."""
        self._unusual: Ints = np.zeros(networks, np.int64)
        """Checks in a row with an unusual loss."""
        self._guessing: Ints = np.zeros(networks, np.int64)
        """Checks in a row in which a network guessed that had done better."""
        self._best_skill: Floats = np.full(networks, -np.inf)

    def restart(self, rows: Bools) -> None:
        """Forget what was usual for the networks ``rows``, bool ``[E]``, and how well they did."""
        self.forget_usual(rows)
        self._best_skill[rows] = -np.inf

    def forget_usual(self, rows: Bools) -> None:
        """Forget what was usual for the networks ``rows``, bool ``[E]``, but not how well they did."""
        self._losses[rows] = np.nan
        self._unusual[rows] = 0
        self._guessing[rows] = 0

    def state_dict(self) -> dict[str, Any]:
        """What was usual so far, as plain values."""
        return to_plain(self._memory())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take as usual what `state_dict` gave.

        Raises:
            CheckpointError: it is of another number of networks or another window.
        """
        memory = from_plain(self._memory(), state, "the governor's monitor")
        self._losses, self._unusual = memory["losses"], memory["unusual"]
        self._guessing, self._best_skill = memory["guessing"], memory["best_skill"]

    def _memory(self) -> dict[str, NDArray[Any]]:
        return {
            "losses": self._losses,
            "unusual": self._unusual,
            "guessing": self._guessing,
            "best_skill": self._best_skill,
        }

    def judge(self, vitals: Vitals, hopeless: Bools | None = None) -> Assessment:
        """Look at all networks once; of those in trouble, what was usual is forgotten.

        ``hopeless``, bool ``[E]``, says whose loss is unusual whatever it was before; None: nobody's.
        """
        settings = self._settings
        mean, deviation = self._describe_usual()
        unusual = (vitals.loss > mean + settings.sigmas * deviation) & (vitals.loss > settings.multiple * mean)
        if hopeless is not None:
            unusual |= hopeless
        guessing = (self._best_skill >= settings.lead) & (vitals.skill <= settings.collapsed)
        self._unusual = np.where(unusual, self._unusual + 1, 0)
        self._guessing = np.where(guessing, self._guessing + 1, 0)
        trouble = np.select(
            [~vitals.finite, self._guessing >= settings.patience, self._unusual >= settings.patience],
            [Trouble.NOT_FINITE, Trouble.COLLAPSED, Trouble.EXPLODED],
            Trouble.NONE,
        ).astype(np.int8)
        sound = trouble == Trouble.NONE
        usual = sound & ~unusual & ~guessing
        worse = vitals.loss > mean + settings.good_sigmas * deviation
        self._take_in(vitals, usual)
        self.restart(~sound)
        return Assessment(trouble, usual, usual & ~worse)

    def _describe_usual(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each network's window, ``[E]``; infinity and 0 where too little is known."""
        measured = ~np.isnan(self._losses)
        count = measured.sum(axis=1)
        enough = count >= self._settings.fewest
        divisor = np.maximum(count, 1)
        mean = np.where(measured, self._losses, 0.0).sum(axis=1) / divisor
        squares = np.where(measured, (self._losses - mean[:, None]) ** 2, 0.0).sum(axis=1)
        return np.where(enough, mean, np.inf), np.where(enough, np.sqrt(squares / divisor), 0.0)

    def _take_in(self, vitals: Vitals, usual: Bools) -> None:
        moved = np.concatenate([vitals.loss[:, None], self._losses[:, :-1]], axis=1)
        self._losses = np.where(usual[:, None], moved, self._losses)
        better = usual & (vitals.skill > self._best_skill)
        self._best_skill = np.where(better, vitals.skill, self._best_skill)
