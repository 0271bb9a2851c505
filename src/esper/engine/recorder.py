"""The events of a decision, made in one place for whoever trains: gates, changes of stage, rollbacks and the step."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from esper.engine.engine import GrowthEngine
from esper.engine.governor import Trouble
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.rules import GATES, Reason
from esper.lifecycle.table import NO_BLUEPRINT, SeedRating, Stage
from esper.lifecycle.transitions import Cause, Transitions
from esper.numerics.arrays import Bools, Floats, Int8s
from esper.runs.events import GateChecked, LifecycleTransition, NetworkStep, RolledBack, StepTaken

RATED = ("error", "price", "threshold", "loss_gain", "loss_error", "loss_threshold")
"""The figures of a rating that an event of its slot has."""


class DecisionRecorder:
    """Makes the events of an engine's newest decision; who trains adds the fields that only they know.

    ``blueprints``: names by index. ``place``: the first fields of an event, by the index of its network. ``decimals``:
    number kept of figures; None: all.
    """

    def __init__(
        self,
        engine: GrowthEngine,
        blueprints: Sequence[str],
        place: Callable[[int], NetworkStep],
        decimals: int | None = None,
    ) -> None:
        self._engine, self._blueprints, self._place, self._decimals = engine, blueprints, place, decimals
        shape = engine.networks.table.stage.shape
        self.reasons: Int8s = np.full(shape, Reason.NO_GATE, np.int8)
        """The latest `Reason` of the gate ahead of each slot, ``[E, S]``."""
        self.gated_stages: Int8s = np.full(shape, Stage.DORMANT, np.int8)
        """The stages that they were of, ``[E, S]``."""

    def record_gates(self, running: Bools) -> Iterator[GateChecked]:
        """Gates that have opened, closed or come ahead of a slot, in the networks ``running [E]``."""
        stages, reasons = self._engine.applied.stages, self._engine.applied.gates
        changed = (reasons != self.reasons) | (stages != self.gated_stages)
        self.reasons, self.gated_stages = reasons, stages
        for row, slot in np.argwhere(changed & (reasons != Reason.NO_GATE) & running[:, None]).tolist():
            reason, gate = Reason(reasons[row, slot]), GATES[Stage(stages[row, slot])]
            passed = reason is Reason.PASSED
            yield GateChecked(**self._place(row), slot=slot, gate=gate, passed=passed, reason=reason.name.lower())

    def record_transitions(
        self,
        changes: Transitions,
        running: Bools,
        ratings: Sequence[SeedRating[float | None] | None] = (),
        contributions: Floats | None = None,
    ) -> Iterator[LifecycleTransition]:
        """Changes of stage in the networks ``running [E]``, with the ratings that decided them, one for each, if any.

        ``contributions [E, S]`` are those known at the decision, unless they are given.
        """
        contributions = self._engine.contributions_before if contributions is None else contributions
        blueprints: list[int] = changes.blueprint.tolist()
        for index, blueprint in enumerate(blueprints):
            row, slot = int(changes.env[index]), int(changes.slot[index])
            rating = ratings[index] if ratings else None
            if not running[row]:
                continue  # cooldowns go on where an episode is over
            yield LifecycleTransition(
                **self._place(row),
                slot=slot,
                before=Stage(changes.before[index]).name.lower(),
                after=Stage(changes.after[index]).name.lower(),
                blueprint=None if blueprint == NO_BLUEPRINT else self._blueprints[blueprint],
                cause=Cause(changes.cause[index]).name.lower(),
                reason=Reason(changes.reason[index]).name.lower(),
                contribution=replace_unmeasured([float(contributions[row, slot])])[0],
                **({name: getattr(rating, name) for name in RATED} if rating is not None else {}),
            )

    def record_rollbacks(self, **own: float) -> Iterator[RolledBack]:
        """The networks that the governor rolled back; ``own`` losses and metrics replace those of a population."""
        assessed = self._engine.assessed
        intervention, before, after = assessed.intervention, assessed.before_rollback, assessed.evaluation
        for row in intervention.rows.nonzero()[0].tolist():
            figures = {
                "loss_before": float(before.loss[row]),
                "metric_before": float(before.accuracy[row]),
                "loss_after": float(after.loss[row]),
                "metric_after": float(after.accuracy[row]),
            }
            yield RolledBack(
                **self._place(row),
                trouble=Trouble(intervention.trouble[row]).name.lower(),
                pruned=tuple(intervention.transitions.slot[intervention.transitions.env == row].tolist()),
                ended=bool(intervention.exhausted[row]),
                **{**figures, **own},
            )

    def record_steps(self, rows: Iterable[int], **own: Sequence[Any]) -> Iterator[StepTaken]:
        """The decisions of the networks ``rows`` with their state; ``own`` are further fields, or others, ``[E]``."""
        assessed, table, actions = self._engine.assessed, self._engine.networks.table, self._engine.applied.actions
        training, evaluation, measurements = assessed.training, assessed.evaluation, assessed.measurements
        contributions = [replace_unmeasured(row) for row in self.round(evaluation.accuracy_contribution)]
        known = measurements.gradient_weight > 0
        # Ratios range over many orders of magnitude, so what is kept are significant digits.
        ratios, vanished, exploded = (
            [
                replace_unmeasured([float(f"{value:.4g}") for value in row])
                for row in np.where(known, figure, np.nan).tolist()
            ]
            for figure in (training.health.ratio, measurements.vanished_share, measurements.exploded_share)
        )
        ops, slots, blueprints = (actions[:, head].tolist() for head in (Head.OP, Head.SLOT, Head.BLUEPRINT))
        # Whole columns, since rounding each number on its own costs far more.
        columns: dict[str, Sequence[Any]] = {
            "op": [Op(op).name.lower() for op in ops],
            "slot": [None if op == Op.WAIT else slot for op, slot in zip(ops, slots, strict=True)],
            "blueprint": [
                self._blueprints[blueprint] if op == Op.GERMINATE else None
                for op, blueprint in zip(ops, blueprints, strict=True)
            ],
            "train_loss": self.round(training.loss),
            "loss": self.round(evaluation.loss),
            "metric": self.round(evaluation.accuracy),
            "stages": [
                tuple(Stage(stage).name.lower() for stage in row)
                for row in cast("list[list[int]]", table.stage.tolist())
            ],
            "blueprints": [
                tuple(None if index == NO_BLUEPRINT else self._blueprints[index] for index in row)
                for row in cast("list[list[int]]", table.blueprint.tolist())
            ],
            "alphas": [tuple(row) for row in self.round(table.alpha)],
            "contributions": contributions,
            "gradient_ratios": ratios,
            "vanished_shares": vanished,
            "exploded_shares": exploded,
            **own,
        }
        for row in rows:
            yield StepTaken(**self._place(row), **{name: column[row] for name, column in columns.items()})

    def round(self, values: NDArray[np.floating[Any]]) -> list[Any]:
        """The values as nested lists, with as many decimals as are kept."""
        exact = values.astype(np.float64)
        return (exact if self._decimals is None else np.round(exact, self._decimals)).tolist()


def replace_unmeasured(values: Sequence[Any]) -> tuple[float | None, ...]:
    """The values, with None for those that were not measured."""
    return tuple(None if math.isnan(value) else value for value in values)
