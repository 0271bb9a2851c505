"""The governor: watches losses and skills of E networks and rolls back those whose training blows up."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from esper.config.settings import LARGEST_COUNT, Settings
from esper.lifecycle.transitions import Transitions
from esper.numerics.arrays import Bools, Floats, Int8s, Ints
from esper.serialization import from_plain, to_plain


class GovernorSettings(Settings):
    """When training counts as diverged and is rolled back. The governor checks once per decision.

    Skill is 0 for guessing and 1 for perfection: ``(accuracy - chance) / (1 - chance)``.
    """

    window: int = Field(default=8, ge=2, le=1000)
    """Number of recent checks whose losses define the usual range."""
    fewest: int = Field(default=3, ge=2, le=1000)
    """Minimum number of losses before one can be unusual; at most the window."""
    sigmas: float = Field(default=4.0, gt=0)
    """A loss is unusual if it exceeds the window's mean by this many standard deviations, and also `multiple`."""
    multiple: float = Field(default=2.0, gt=1)
    """A loss is unusual if it exceeds this multiple of the window's mean (a mean below 0: by as much), and also
    `sigmas`."""
    patience: int = Field(default=3, ge=1, le=1000)
    """Consecutive checks with an unusual loss, or at the level of guessing, before a rollback. A network that is not
    finite is rolled back immediately. A `Grower` raises an error after as many decisions at which a loss or metric is
    not finite although the model is."""
    good_sigmas: float = Field(default=1.0, ge=0)
    """A snapshot is taken if the loss is at most the mean plus this many standard deviations."""
    lead: float = Field(default=0.25, gt=0, le=1)
    """Skill that a network must have reached before it can collapse, and that it must have lost again for an unusual
    training loss to be trouble: a loss near 0 may double by noise alone."""
    collapsed: float = Field(default=0.05, ge=0, lt=1)
    """Skill at or below which a network has collapsed to guessing."""
    max_rollbacks: int = Field(default=3, ge=0, le=LARGEST_COUNT)
    """Maximum number of rollbacks per episode, or of a single model until it regains the training loss of its snapshot.
    After that, diverged training ends in the state of the last snapshot."""
    penalty: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Reward subtracted for each rollback, in units of the objective."""

    @model_validator(mode="after")
    def _losses_become_known(self) -> Self:
        if self.fewest > self.window:
            raise ValueError(
                f"no loss can ever be unusual: fewest is {self.fewest}, but the window has only {self.window}; lower "
                "fewest or raise window"
            )
        return self


class Trouble(IntEnum):
    """Why a network is rolled back; NONE, which is falsy, where it is not."""

    NONE = 0
    NOT_FINITE = 1
    """A gradient, parameter or moment of the optimizer, or a loss in a population, is infinite or not a number."""
    COLLAPSED = 2
    """The network guesses, and did better before."""
    EXPLODED = 3
    """The loss has been far above the usual for several checks in a row, and skill was lost."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check; all ``[E]``."""

    trouble: Int8s
    """A `Trouble`."""
    usual: Bools
    """Whether nothing is wrong that becomes trouble if it lasts."""
    good: Bools
    """Whether the state is worth a snapshot."""


def skill(accuracy: Floats, classes: int) -> Floats:
    """``(accuracy - chance) / (1 - chance)`` with the chance of guessing right, 1 / classes."""
    chance = 1 / classes
    return (accuracy - chance) / (1 - chance)


class Monitor:
    """Detects trouble from losses and skills over time, in each network and by each measure of skill by itself.

    Only the last measure decides whether an unusual loss is trouble. In a grower that is the skill by losses, which a
    network that overfits, and so loses accuracy, has not lost.
    """

    def __init__(self, settings: GovernorSettings, networks: int, measures: int = 1) -> None:
        self._settings = settings
        shape = networks, measures
        self._now: dict[str, NDArray[Any]] = {
            # Losses that were not unusual, the newest first, [E, M, window].
            "losses": np.full((*shape, settings.window), np.nan),
            # Checks in a row with an unusual loss, and with a skill of guessing that once was better, [E, M].
            "unusual": np.zeros(shape, np.int64),
            "guessing": np.zeros(shape, np.int64),
            "best_skill": np.full(shape, -np.inf),
        }
        self._saved = {name: array.copy() for name, array in self._now.items()}
        """The state at each network's last snapshot."""

    def check(self, loss: Floats, skill: Floats, finite: Bools, diverged: Bools | None = None) -> Diagnosis:
        """Check all networks once, as `Governor.check` does; the history of those in trouble is forgotten."""
        settings, now, loss = self._settings, self._now, loss[:, None]
        mean, deviation = self._describe_window()
        far = mean + (settings.multiple - 1) * np.abs(mean)
        unusual = (loss > mean + settings.sigmas * deviation) & (loss > far)
        lost = skill[:, -1:] <= now["best_skill"][:, -1:] - settings.lead
        if diverged is not None:
            unusual |= diverged[:, None]
            lost |= diverged[:, None]
        guessing = (now["best_skill"] >= settings.lead) & (skill <= settings.collapsed)
        now["unusual"] = np.where(unusual, now["unusual"] + 1, 0)
        now["guessing"] = np.where(guessing, now["guessing"] + 1, 0)
        # Either becomes trouble if it lasts, a loss if skill was lost with it; what is not finite is trouble at once.
        not_finite = ~np.broadcast_to(finite[:, None], unusual.shape)
        trouble = np.select(
            [not_finite, now["guessing"] >= settings.patience, lost & (now["unusual"] >= settings.patience)],
            [Trouble.NOT_FINITE, Trouble.COLLAPSED, Trouble.EXPLODED],
            Trouble.NONE,
        ).astype(np.int8)
        sound = trouble == Trouble.NONE
        usual = sound & ~unusual & ~guessing & np.isfinite(loss)
        worse = loss > mean + settings.good_sigmas * deviation
        # The window takes what is usual; after trouble, and at another level of losses, it begins anew.
        window = np.concatenate([np.broadcast_to(loss, unusual.shape)[..., None], now["losses"][..., :-1]], axis=-1)
        now["losses"] = np.where(usual[..., None], window, now["losses"])
        now["best_skill"] = np.where(usual & (skill > now["best_skill"]), skill, now["best_skill"])
        self.forget(~sound, skill=True)
        # Losses that stay high for a whole window while nothing is lost are the usual ones from now on.
        settled = sound & (now["unusual"] >= max(settings.window, settings.patience))
        now["losses"][settled] = np.nan
        now["unusual"][settled] = 0
        first = (~sound).argmax(axis=1)[:, None]
        return Diagnosis(
            np.take_along_axis(trouble, first, axis=1)[:, 0], usual.all(axis=1), (usual & ~worse).all(axis=1)
        )

    def forget(self, rows: Bools, *, skill: bool) -> None:
        """Forget the usual losses in ``rows``, bool ``[E]`` or ``[E, M]``, and with ``skill`` how well they did."""
        self._now["losses"][rows] = np.nan
        self._now["unusual"][rows] = self._now["guessing"][rows] = 0
        if skill:
            self._now["best_skill"][rows] = -np.inf

    def save(self, rows: Bools) -> None:
        """Keep the state of the networks ``rows``, bool ``[E]``, for `restore`: a snapshot is taken of them."""
        for name, array in self._now.items():
            self._saved[name][rows] = array[rows]

    def restore(self, rows: Bools) -> None:
        """Put the networks ``rows``, bool ``[E]``, back into the state at their last `save`."""
        for name, array in self._now.items():
            array[rows] = self._saved[name][rows]

    def _describe_window(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each window, ``[E, M]``; infinity and 0 where too little is known."""
        losses = self._now["losses"]
        measured = ~np.isnan(losses)
        count = measured.sum(axis=-1)
        enough = count >= self._settings.fewest
        divisor = np.maximum(count, 1)
        mean = np.where(measured, losses, 0.0).sum(axis=-1) / divisor
        squares = np.where(measured, (losses - mean[..., None]) ** 2, 0.0).sum(axis=-1)
        return np.where(enough, mean, np.inf), np.where(enough, np.sqrt(squares / divisor), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The state now and at the last snapshot, as plain values."""
        return to_plain({"now": self._now, "saved": self._saved})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        values = from_plain({"now": self._now, "saved": self._saved}, state, "the governor's monitor")
        self._now, self._saved = values["now"], values["saved"]


class Restorable(Protocol):
    """E networks that can return to their last good state."""

    @property
    def size(self) -> int:
        """E."""
        ...

    def snapshot(self, rows: Bools) -> None:
        """Keep the present state of the networks ``rows``, bool ``[E]``, as the one to return to."""
        ...

    def restore(self, rows: Bools) -> Transitions:
        """Return the networks ``rows``, bool ``[E]``, to their last snapshot; returns what was pruned."""
        ...


@dataclass(frozen=True)
class Intervention:
    """The result of the governor's check; all ``[E]`` but the transitions."""

    trouble: Int8s
    """A `Trouble`; NONE for most."""
    usual: Bools
    """Whether nothing is wrong that becomes trouble if it lasts."""
    exhausted: Bools
    """Networks that had no rollback left; they are restored too, and should not go on."""
    loss_restored: Floats
    """The training loss when the snapshot was taken; NaN for a snapshot from before any check."""
    transitions: Transitions
    """The modules that were pruned."""

    @property
    def rows(self) -> Bools:
        """Which networks were rolled back."""
        return self.trouble != Trouble.NONE


class Governor:
    """Keeps a snapshot of every network in good condition, and rolls networks in trouble back to it.

    Without ``settings`` nothing is watched. ``measures``: M, how many measures of skill are checked.
    """

    def __init__(self, networks: Restorable, settings: GovernorSettings | None, measures: int = 1) -> None:
        self._networks = networks
        self.settings = settings
        self.rollbacks: Ints = np.zeros(networks.size, np.int64)
        """Rollbacks in the present episodes, one beyond the limit included, ``[E]``."""
        self._snapshot_loss: Floats = np.full(networks.size, np.nan)
        self._monitor = None if settings is None else Monitor(settings, networks.size, measures)
        if self._monitor is not None:
            self._take_snapshots(np.ones(networks.size, np.bool_), self._snapshot_loss)

    @property
    def penalty(self) -> float:
        """The price of a rollback in reward."""
        return 0.0 if self.settings is None else self.settings.penalty

    @property
    def rollbacks_used(self) -> Floats:
        """``[E]``: the fraction of the allowed rollbacks that an episode has had, in [0, 1]."""
        allowed = 0 if self.settings is None else self.settings.max_rollbacks
        return np.minimum(self.rollbacks / max(allowed, 1), 1.0)

    def check(self, loss: Floats, skill: Floats, finite: Bools, diverged: Bools | None, running: Bools) -> Intervention:
        """Snapshot the networks in good condition, and restore those that are in trouble.

        Args:
            loss: The training loss, ``[E]``.
            skill: By M measures: 0 for guessing, 1 for perfection; NaN where unknown, ``[E, M]``.
            finite: Whether losses, gradients, parameters and moments are all finite, ``[E]``.
            diverged: Whether the loss is unusual whatever it was before, ``[E]``; None: of no network.
            running: The networks that may be restored, ``[E]``. The others have ended and do not change.
        """
        nothing = np.zeros(len(running), np.bool_)
        if self.settings is None or self._monitor is None:
            untroubled = np.zeros(len(running), np.int8)
            return Intervention(untroubled, ~nothing, nothing, self._snapshot_loss, Transitions.none())
        diagnosis = self._monitor.check(loss, skill, finite, diverged)
        self._take_snapshots(diagnosis.good, loss)
        trouble = np.where(running, diagnosis.trouble, np.int8(Trouble.NONE))
        rows = trouble != Trouble.NONE
        if not rows.any():
            return Intervention(trouble, diagnosis.usual, nothing, self._snapshot_loss, Transitions.none())

        # What was usual at the snapshot is usual again, except where the network loses modules on the way.
        transitions = self._networks.restore(rows)
        self._monitor.restore(rows)
        self._monitor.forget(np.isin(np.arange(len(rows)), transitions.env), skill=False)
        self.rollbacks = self.rollbacks + rows
        exhausted = rows & (self.rollbacks > self.settings.max_rollbacks)
        return Intervention(trouble, diagnosis.usual, exhausted, self._snapshot_loss, transitions)

    def expect_change(self, rows: Bools, *, forget_skill: Bools) -> None:
        """The loss of the networks ``rows``, bool ``[E]``, may rise: they were changed on purpose.

        Those of ``forget_skill``, bool ``[E]``, may fall back to guessing: what helped was taken away.
        """
        if self._monitor is not None:
            self._monitor.forget(rows & ~forget_skill, skill=False)
            self._monitor.forget(rows & forget_skill, skill=True)

    def restart(self, rows: Bools) -> None:
        """Begin anew in ``rows``, bool ``[E]``, which hold other networks now."""
        self.rollbacks = np.where(rows, 0, self.rollbacks)
        if self._monitor is not None:
            self._monitor.forget(rows, skill=True)
            self._take_snapshots(rows, np.full(len(rows), np.nan))

    def _take_snapshots(self, rows: Bools, loss: Floats) -> None:
        if self._monitor is not None and rows.any():
            self._networks.snapshot(rows)
            self._monitor.save(rows)
            self._snapshot_loss = np.where(rows, loss, self._snapshot_loss)

    def state_dict(self) -> dict[str, Any]:
        """Rollbacks and what the detectors remember, as plain values; snapshots are saved with the networks."""
        return to_plain(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        values = from_plain(self._state(), state, "the governor's state")
        self.rollbacks, self._snapshot_loss = values["rollbacks"], values["snapshot_loss"]

    def _state(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "snapshot_loss": self._snapshot_loss, "monitor": self._monitor}
