"""The end of growth: what is unfinished is measured, and kept or pruned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.control.rules.decisions import marginal_rent
from esper.grower.decision import Change, changed
from esper.grower.subject import ModelSubject
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions, concatenate
from esper.training.deferred import Floats

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Ending:
    """What became of the seeds that were unfinished when growth ended; nothing, if there were none."""

    changes: tuple[Change, ...]
    """To FOSSILIZED or PRUNED, in the order in which it was decided; their cause is FINISH."""
    contributions: dict[str, float]
    """By slot, of the seeds that counted: as in `Decision`, measured when they were judged."""

    def __str__(self) -> str:
        return f"finished: {', '.join(map(self._told, self.changes)) or 'nothing was unfinished'}"

    @property
    def lines(self) -> list[str]:
        """What was decided, a line for each seed."""
        return [f"finished: {told}" for told in map(self._told, self.changes)] or [str(self)]

    def _told(self, change: Change) -> str:
        verb = "kept" if change.after is Stage.FOSSILIZED else "pruned"
        known = self.contributions.get(change.slot)
        worth = "did not count yet" if known is None else f"contribution {known:+.4f}"
        return f"{verb} {change.blueprint} in {change.slot} ({worth})"


def resolved(
    subject: ModelSubject,
    rent: float,
    measure: Callable[[Bools], tuple[Floats, bool]],
    resolve: Callable[[Bools, Bools], Transitions],
    slots: Sequence[str],
) -> Ending:
    """End growth: keep the unfinished seeds that are worth their rent, and prune the others.

    What does not count yet, or is being pruned, goes first: the model computes the same without it, or is about to.
    Then seeds that lean on each other are judged one by one: the least valuable goes if it is not worth its rent, and
    the others are measured anew, until all that remain are worth theirs.

    Args:
        subject: The model; ``resolve`` changes its table.
        rent: As for `esper.Grower`.
        measure: Contributions ``[1, S]`` of the seeds in the slots that it is given, as they are now, and whether the
            model gives the same answer to everything: then no seed is worth anything.
        resolve: Fossilizes the seeds in its first slots and prunes those in its second; returns what changed.
        slots: Their names.
    """
    nothing = np.zeros(subject.table.stage.shape, np.bool_)
    table = subject.table
    idle = table.live & (table.pruning | ~table.blended | (table.alpha == 0))
    parts = [resolve(nothing, idle)]
    known = np.full(table.stage.shape, np.nan)
    while (live := subject.table.live).any():
        found, blind = measure(live)
        known = np.where(live, found, known)
        worth = np.where(blind, -math.inf, known - _rents(subject, rent))
        worth = np.where(live, np.where(np.isnan(worth), -math.inf, worth), math.inf)
        if worth.min() >= 0:
            parts.append(resolve(live, nothing))
        else:
            least = nothing.copy()
            least.flat[worth.argmin()] = True
            parts.append(resolve(nothing, least))
    contributions = {name: value for name, value in zip(slots, known[0].tolist(), strict=True) if math.isfinite(value)}
    kinds = [kind.name for kind in subject.specs.kinds]
    return Ending(changed(slots, kinds, concatenate(parts)), contributions)


def _rents(subject: ModelSubject, rent: float) -> Floats:
    """What each seed adds to the model's rent, ``[1, S]``."""
    host, table = subject.host_parameters, subject.table
    cost = subject.specs.costs.parameters.resident(table) / host[:, None]
    return marginal_rent(np.array([rent]), cost, subject.parameters_in(table.blended) / host)
