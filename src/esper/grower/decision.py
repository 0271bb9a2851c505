"""What a grower decided and how growth ended, for the person who trains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.control.rules import compute_marginal_rents
from esper.engine.measurements import Evaluation
from esper.grower.governor import Rollback
from esper.grower.network import GrowingNetwork
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.rules import Reason
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Cause, Transitions, concatenate_transitions
from esper.numerics.arrays import Bools, Floats, Ints
from esper.runs.metric import LOSS


@dataclass(frozen=True)
class Change:
    """A slot that entered another stage."""

    slot: str
    before: Stage
    after: Stage
    blueprint: str | None
    """Blueprint of the seed that came, stayed or went; None in a cooldown."""
    cause: Cause
    reason: Reason
    """What the gate before the new stage said."""


@dataclass(frozen=True)
class Decision:
    """One decision, and what it led to."""

    number: int
    """From 1."""
    op: Op
    slot: str | None
    """The slot that was acted on; None for WAIT."""
    blueprint: str | None
    """What germinated; None for other operations."""
    changes: tuple[Change, ...]
    """Also those that time brought, and rollbacks."""
    contributions: dict[str, float]
    """By slot: the score with the seed less the score without it, as last measured. Without it is with it switched off,
    so that this says how much the model depends on it; of seeds on trial under evidence ``refit``, it is a fork that
    has trained on without the seed, and they are missing until there is one to compare with."""
    loss: float
    """Validation loss, before the decision, and after a rollback if there was one."""
    metric: str
    """Name of what growth is about; empty as long as that is not known."""
    value: float
    """What growth is about as it was measured, likewise, in its own units."""
    score: float
    """Likewise, better the higher it is: that value or the share of it that is gone, as `esper.grower.scores` tells."""
    rollback: Rollback | None
    """What the governor did before the decision, if anything."""
    finished: bool
    """Whether there was nothing more to decide, as `esper.Grower.finished` tells: stop training."""
    broken: str
    """Which constraints were broken when it was made, and by how much; empty if none was."""

    def __str__(self) -> str:
        return f"decision {self.number}: {self.what}; loss {self.loss:.4g}{self.measured}{self.broken}"

    @property
    def metrics(self) -> dict[str, float]:
        """Its figures by name, for a logger: what was measured, and how many slots entered each stage."""
        entered = Counter(change.after.name.lower() for change in self.changes)
        return {
            "validation_loss": self.loss,
            **({f"validation_{self.metric}": self.value} if self.metric else {}),
            **{f"contribution/{slot}": value for slot, value in self.contributions.items()},
            **{f"lifecycle/{stage}": float(count) for stage, count in entered.items()},
        }

    @property
    def measured(self) -> str:
        """What growth is about, to come after the loss; nothing where it is the loss."""
        return f", {self.metric} {self.value:.4g}" if self.metric not in ("", LOSS) else ""

    @property
    def what(self) -> str:
        """The decision in words, without figures."""
        what = self.op.name.lower()
        where = "" if self.slot is None else f" {self.blueprint} in {self.slot}" if self.blueprint else f" {self.slot}"
        undone = "" if self.rollback is None else f" after a rollback ({self.rollback.trouble.name.lower()})"
        over = ": finished" if self.finished else ""
        return f"{what}{where}{undone}{over}"


def describe_decision(
    number: int,
    slots: Sequence[str],
    blueprints: Sequence[str],
    actions: Ints,
    changes: Transitions,
    evaluation: Evaluation,
    metric: str,
    value: float,
    rollback: Rollback | None,
    finished: bool,
    broken: str,
) -> Decision:
    """A decision in words: from the actions ``[1, 8]``, what they changed and what was measured before.

    The ``metric`` that growth is about had that ``value``.
    """
    op = Op(int(actions[0, Head.OP]))
    pairs = zip(slots, evaluation.accuracy_contribution[0].tolist(), strict=True)
    return Decision(
        number,
        op,
        None if op is Op.WAIT else slots[int(actions[0, Head.SLOT])],
        blueprints[int(actions[0, Head.BLUEPRINT])] if op is Op.GERMINATE else None,
        describe_changes(slots, blueprints, changes),
        {name: value for name, value in pairs if math.isfinite(value)},
        float(evaluation.loss[0]),
        metric,
        value,
        float(evaluation.accuracy[0]),
        rollback,
        finished,
        broken,
    )


def describe_changes(slots: Sequence[str], blueprints: Sequence[str], changes: Transitions) -> tuple[Change, ...]:
    """Changes of one model in words."""
    return tuple(
        Change(
            slots[int(changes.slot[index])],
            Stage(int(changes.before[index])),
            Stage(int(changes.after[index])),
            blueprints[int(changes.blueprint[index])] if changes.blueprint[index] >= 0 else None,
            Cause(int(changes.cause[index])),
            Reason(int(changes.reason[index])),
        )
        for index in range(len(changes))
    )


@dataclass(frozen=True)
class Ending:
    """What became of the seeds that were unfinished when growth ended; nothing, if there were none."""

    changes: tuple[Change, ...]
    """To FOSSILIZED or PRUNED, in the order in which it was decided; their cause is FINISH."""
    contributions: dict[str, float]
    """By slot, of the seeds that counted: as in `Decision`, measured when they were judged."""

    def __str__(self) -> str:
        return f"finished: {', '.join(map(self._describe, self.changes)) or 'nothing was unfinished'}"

    @property
    def lines(self) -> list[str]:
        """What was decided, a line for each seed."""
        return [f"finished: {fate}" for fate in map(self._describe, self.changes)] or [str(self)]

    def _describe(self, change: Change) -> str:
        verb = "kept" if change.after is Stage.FOSSILIZED else "pruned"
        contribution = self.contributions.get(change.slot)
        worth = "did not count yet" if contribution is None else f"contribution {contribution:+.4f}"
        return f"{verb} {change.blueprint} in {change.slot} ({worth})"


def resolve_unfinished(
    network: GrowingNetwork,
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
        network: The model; ``resolve`` changes its table.
        rent: As for `esper.Grower`.
        measure: Contributions ``[1, S]`` of the seeds in the slots that it is given, as they are now, and whether the
            model is one on which none may be kept.
        resolve: Fossilizes the seeds in its first slots and prunes those in its second; returns what changed.
        slots: Their names.
    """
    nothing = np.zeros(network.table.stage.shape, np.bool_)
    table = network.table
    idle = table.live & (table.pruning | ~table.blended | (table.alpha == 0))
    parts = [resolve(nothing, idle)]
    known = np.full(table.stage.shape, np.nan)
    while (live := network.table.live).any():
        found, unfit = measure(live)
        known = np.where(live, found, known)
        worth = known - _compute_rents(network, rent)
        worth = np.where(live, np.where(np.isnan(worth), -math.inf, worth), math.inf)
        if worth.min() >= 0 and not unfit:
            parts.append(resolve(live, nothing))
        else:
            least = nothing.copy()
            least.flat[worth.argmin()] = True
            parts.append(resolve(nothing, least))
    contributions = {name: value for name, value in zip(slots, known[0].tolist(), strict=True) if math.isfinite(value)}
    return Ending(describe_changes(slots, network.blueprints, concatenate_transitions(parts)), contributions)


def _compute_rents(network: GrowingNetwork, rent: float) -> Floats:
    """What each seed adds to the model's rent, ``[1, S]``."""
    charge, table = network.charge, network.table
    return compute_marginal_rents(np.array([rent]), charge.of_residents(table), charge.added(table, table.blended))
