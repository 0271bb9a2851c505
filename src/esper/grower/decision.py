"""What a grower decided, for the person who trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.actions import Head, Op
from esper.lifecycle.gates import Reason
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Cause, Transitions
from esper.telemetry.metric import LOSS
from esper.training.evaluation import Evaluation
from esper.training.governor.model import Rollback


@dataclass(frozen=True)
class Change:
    """A slot that entered another stage."""

    slot: str
    before: Stage
    after: Stage
    blueprint: str | None
    """Of the seed that came, stayed or went; None in a cooldown."""
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
    """None for WAIT."""
    blueprint: str | None
    """What germinated; None for other operations."""
    changes: tuple[Change, ...]
    """Also those that time brought, and rollbacks."""
    contributions: dict[str, float]
    """By slot: the score with the seed less the score without it, as last measured. Without it is with it switched off,
    so that this says how much the model depends on it; of seeds on trial under evidence ``refit``, it is a fork that
    has trained on without the seed, and they are missing until there is one to compare with."""
    loss: float
    """Of validation, before the decision, and after a rollback if there was one."""
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

    def __str__(self) -> str:
        return f"decision {self.number}: {self.what}; loss {self.loss:.4g}{self.measured}"

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
        over = ": finished, on a plateau" if self.finished else ""
        return f"{what}{where}{undone}{over}"


def told(
    number: int,
    slots: Sequence[str],
    blueprints: Sequence[str],
    actions: NDArray[np.int64],
    changes: Transitions,
    evaluation: Evaluation,
    metric: str,
    value: float,
    rollback: Rollback | None,
    finished: bool,
) -> Decision:
    """A decision in words: from the actions ``[1, 8]``, what they changed and what was measured before.

    The ``metric`` that growth is about had that ``value``.
    """
    op = Op(int(actions[0, Head.OP]))
    found = zip(slots, evaluation.accuracy_contribution[0].tolist(), strict=True)
    return Decision(
        number,
        op,
        None if op is Op.WAIT else slots[int(actions[0, Head.SLOT])],
        blueprints[int(actions[0, Head.BLUEPRINT])] if op is Op.GERMINATE else None,
        changed(slots, blueprints, changes),
        {name: value for name, value in found if math.isfinite(value)},
        float(evaluation.loss[0]),
        metric,
        value,
        float(evaluation.accuracy[0]),
        rollback,
        finished,
    )


def changed(slots: Sequence[str], blueprints: Sequence[str], changes: Transitions) -> tuple[Change, ...]:
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
