"""The growth engine: everything about the growth of networks but their training; its settings and interfaces."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.engine.budget import Budget
from esper.engine.governor import Governor, GovernorSettings, Intervention, Restorable
from esper.engine.gradients import GradientHealthSettings, update_gradient_health
from esper.engine.history import History
from esper.engine.measurements import Evaluation, TrainingReport, update_measurements
from esper.engine.observation import FeatureInputs, GrowingNetworks, Observation, observe
from esper.growth.promise import PromiseRecord, Promises, PromiseSettings
from esper.lifecycle.actions import make_wait_actions
from esper.lifecycle.rules import ActionMasks, Reason
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import Step, Transitions
from esper.numerics.arrays import Bools, Floats, Ints, replace_where
from esper.numerics.devices import Deferred
from esper.serialization import from_plain, to_plain


class GrowthConfig(Settings):
    """Settings of growth, in episodes and in an `esper.Grower`: rollbacks, budget, measurements and plateau."""

    governor: GovernorSettings | None = GovernorSettings()
    """Detects diverged training and rolls it back; null: no rollbacks."""
    budget: Budget = Budget()
    """Limits on the cost of growth."""
    gradient_health: GradientHealthSettings = GradientHealthSettings()
    """When the gradient of a seed is healthy (gate G2)."""
    plateau: int | None = Field(default=None, ge=1, le=1000)
    """Decisions without improvement of the validation loss after which an episode ends, if no seed is unfinished; null:
    episodes run to their horizon. A grower then stops deciding and is `finished`; it uses its metric if you named one.
    """
    counterfactual_every: int = Field(default=1, ge=1, le=1000)
    """Decisions from one measurement of a slot's contribution to the next. Slots take turns. In between, the last
    measurement is used, and controllers observe its age. Above `rules.measurement_max_age` + 1, seeds may have to wait
    for gate G5."""

    promise: PromiseSettings | None = None
    """Measure promises of all blueprints in all free slots for the controller; null: only if the controller needs them.
    """

    def require_measurements(self, horizon: int) -> None:
        """Raise ValueError unless so many decisions measure every slot, and promises in time."""
        if self.counterfactual_every > horizon:
            raise ValueError(
                f"growth.counterfactual_every is {self.counterfactual_every}, but there are only {horizon} decisions: "
                "some slots would never be measured, and their seeds never kept; lower it"
            )
        if self.promise is not None and self.promise.first >= horizon:
            raise ValueError(
                f"promises are first measured after {self.promise.first} decisions, but there are only {horizon}: "
                "lower growth.promise.first, or policy.advice.rule.promise.first"
            )

    def find_due_counterfactuals(self, decision: Ints, slots: int) -> Bools:
        """The slots whose counterfactuals are measured after decision number ``decision [E]``: ``[E, S]``."""
        # Slots take turns: each is due at another remainder.
        return (decision[:, None] + np.arange(slots)) % self.counterfactual_every == 0

    def find_stalled(self, plateau_age: Floats, table: SeedTable) -> Bools:
        """The networks that end on a plateau, ``[E]``, after ``plateau_age [E]`` decisions without an improvement."""
        if self.plateau is None:
            return np.zeros(len(plateau_age), np.bool_)
        # A living seed may still bring the improvement.
        return (plateau_age >= self.plateau) & ~table.live.any(axis=1)


class GrowthBackend(Restorable, Protocol):
    """E networks that the engine can measure, snapshot and restore; ``due``, bool ``[E, S]``, are slots to be measured.

    `start_measurement` measures after ``training``. Its evaluation has `skill` by M = `skills` measures, and `finite`,
    with ``check_finite`` also of parameters and moments. `chance_level` is the loss and score of guessing, as far as
    they are known.
    """

    @property
    def networks(self) -> GrowingNetworks: ...

    @property
    def skills(self) -> int: ...

    @property
    def chance_level(self) -> tuple[float, float]: ...

    def start_measurement(
        self, training: Deferred[TrainingReport], due: Bools, *, check_finite: bool
    ) -> Deferred[tuple[TrainingReport, Evaluation]]: ...

    def evaluate(self, due: Bools) -> Evaluation: ...

    def measure_promises(self, due: Bools) -> Promises: ...


@dataclass(frozen=True)
class Assessed:
    """What was measured after the newest training."""

    training: TrainingReport
    evaluation: Evaluation
    """The networks after rollbacks; `skill`, `finite` and `diverged` are from before them."""
    before_rollback: Evaluation
    intervention: Intervention
    measurements: SeedMeasurements
    """Those that gates go by from now on."""


class GrowthEngine:
    """Observes, masks, applies, measures and rolls back the growth of E networks; it never trains them.

    ```python
    while not done:
        observation, masks = engine.observe(progress, horizon, rent, train_size), engine.legal_actions()
        actions, state = controller.act(observation, masks, state)
        engine.apply(actions)
        training = train()  # a population's minibatches, or the user's own loop
        assessed = engine.assess(training, running)
        engine.measure_promises(running)
    ```

    Call `apply` once before each `assess`. A user's loop trains before its first `Grower.step`, so `esper.Grower`
    applies a first decision, to wait, when it is made.
    What happens to network i follows from its own actions and data alone, whatever E is.
    """

    def __init__(self, backend: GrowthBackend, config: GrowthConfig) -> None:
        self.backend, self.networks, self.config = backend, backend.networks, config
        size, slots, blueprints = self.networks.specs.compatible.shape
        self._snapshot_measurements = SeedMeasurements.none(size, slots)
        self.governor = Governor(self, config.governor, backend.skills)
        self.history = History(size, slots, blueprints, *backend.chance_level)
        self.promises = None if config.promise is None else PromiseRecord(size, slots, blueprints, config.promise)
        self.decisions: Ints = np.zeros(size, np.int64)
        """Decisions taken in the present episodes, ``[E]``."""
        self.applied = self._apply_nothing(make_wait_actions(size))
        """The newest decisions; a loaded engine knows the actions, but not what they did."""
        self.contributions_before: Floats = self.history.accuracy_contribution
        """Contributions that were known when they were taken, ``[E, S]``."""
        self._assessed: Assessed | None = None
        self._overdue: Bools = np.zeros(size, np.bool_)
        """Networks whose promises were due and could not be measured, ``[E]``."""

    def _apply_nothing(self, actions: Ints) -> Step:
        table = self.networks.table
        gates = np.full(table.stage.shape, Reason.NO_GATE, np.int8)
        return Step(actions, table.stage, gates, Transitions.none(), table)

    @property
    def assessed(self) -> Assessed:
        """What was measured after the newest training."""
        assert self._assessed is not None, "nothing was measured since the engine was made or loaded"
        return self._assessed

    def observe(self, progress: Floats, horizon: int, rent: Floats, train_size: Floats) -> Observation:
        """What controllers see now, on the CPU; arguments as in `FeatureInputs`."""
        rollbacks = self.governor.rollbacks_used
        return observe(
            FeatureInputs(self.networks, self.history, progress, horizon, rent, train_size, rollbacks, self.promises)
        )

    def legal_actions(self, disallowed: Bools | None = None) -> ActionMasks:
        """What controllers may do now, without the operations ``disallowed`` (`ActionMasks.without`)."""
        masks = self.networks.legal_actions()
        return masks if disallowed is None or not disallowed.any() else masks.without(disallowed)

    def apply(self, actions: Ints, *, running: Bools | None = None, forget_skill: Bools | None = None) -> Step:
        """Carry out one action per network, int64 ``[E, 8]``, which is ``wait`` outside of ``running``.

        ``running``, bool ``[E]``: networks whose episode goes on; None: all. ``forget_skill``, bool ``[E]``: networks
        that may fall back to guessing if they lose a module now; None: all.
        """
        step = self.networks.decide(actions)
        self.applied, self.contributions_before = step, self.history.accuracy_contribution
        everyone = np.ones(len(actions), np.bool_)
        pruned = step.transitions.env[step.transitions.after == Stage.PRUNED]
        lost_module = np.isin(np.arange(len(actions)), pruned)
        self.governor.expect_change(lost_module, forget_skill=everyone if forget_skill is None else forget_skill)
        self.decisions = self.decisions + (everyone if running is None else running)
        return step

    def assess(self, training: Deferred[TrainingReport], running: Bools) -> Assessed:
        """Measure the networks after ``training``, roll back those in trouble, and record what is known now.

        ``running``, bool ``[E]``, are the networks whose episode goes on; no other is rolled back.
        """
        networks, backend, history = self.networks, self.backend, self.history

        # Measure every network, and with it the modules whose turn it is.
        due = self.config.find_due_counterfactuals(self.decisions - running, networks.table.slots)
        check_finite = self.governor.settings is not None
        report, measured = backend.start_measurement(training, due, check_finite=check_finite).fetch()
        assert measured.skill is not None
        assert measured.finite is not None
        history.set_chance_level(*backend.chance_level)
        before = history.fill_stale_contributions(measured, networks.measurements)
        # Before any snapshot, which keeps the measurements too.
        networks.measurements = update_gradient_health(
            networks.measurements, report.health, self.config.gradient_health
        )

        # Roll back what is in trouble. What was measured of it is of networks that are no more.
        intervention = self.governor.check(report.loss, measured.skill, measured.finite, measured.diverged, running)
        evaluation = before
        if intervention.rows.any():
            again = backend.evaluate(due | intervention.rows[:, None])
            history.set_chance_level(*backend.chance_level)
            again = replace(again, skill=measured.skill, finite=measured.finite, diverged=measured.diverged)
            restored = history.fill_stale_contributions(again, networks.measurements)
            # One model keeps the type of its evaluation, which has more than the arrays.
            evaluation = restored if intervention.rows.all() else replace_where(intervention.rows, before, restored)

        # Record it for gates, and for what controllers see: there an unknown accuracy of training is taken
        # to equal that of validation.
        networks.measurements = update_measurements(networks.table, networks.measurements, evaluation)
        accuracy = np.where(np.isnan(report.accuracy), evaluation.accuracy, report.accuracy)
        history.record(self.applied.actions, networks.table, replace(report, accuracy=accuracy), evaluation)
        self._assessed = Assessed(report, evaluation, before, intervention, networks.measurements)
        return self._assessed

    @property
    def size(self) -> int:
        return self.backend.size

    def snapshot(self, rows: Bools) -> None:
        """Keep the state of the networks ``rows``, bool ``[E]``, with the measurements of their modules."""
        self.backend.snapshot(rows)
        self._snapshot_measurements = replace_where(rows, self._snapshot_measurements, self.networks.measurements)

    def restore(self, rows: Bools) -> Transitions:
        """Return the networks ``rows``, bool ``[E]``, to their last snapshot; returns what was pruned."""
        transitions = self.backend.restore(rows)
        # Modules that stay are as the snapshot has them, and so are their measurements.
        kept = rows[:, None] & self.networks.table.owning
        self.networks.measurements = replace_where(kept, self.networks.measurements, self._snapshot_measurements)
        return transitions

    def measure_promises(self, running: Bools, rows: Bools | None = None, *, supplied: Promises | None = None) -> None:
        """Measure what blueprints promise in free slots, where it is time to.

        ``running``, bool ``[E]``: networks for which another decision has passed; ``rows``: those to be measured, None:
        all of them. ``supplied`` promises were measured otherwise.
        """
        if self.promises is None:
            return
        self.promises.advance_age(running)
        rows = running if rows is None else rows
        due = rows if supplied is not None else self.promises_due() & rows
        if not due.any():
            return
        free = self.networks.table.stage == Stage.DORMANT
        promises = supplied or self.backend.measure_promises(free & due[:, None])
        self.promises.record(due & ~promises.missing, promises.fitted, promises.held_out)
        self._overdue = np.where(due, promises.missing, self._overdue)

    def promises_due(self) -> Bools:
        """``[E]``: the networks whose promises are measured before the next decision."""
        if self.promises is None:
            return np.zeros_like(self._overdue)
        return self.promises.settings.is_due(self.decisions) | self._overdue

    def find_stalled(self) -> Bools:
        """``[E]``: the networks whose growth ends on a plateau."""
        return self.config.find_stalled(self.history.plateau_age, self.networks.table)

    def restart(self, rows: Bools) -> None:
        """Begin new episodes in ``rows``, bool ``[E]``, which hold other networks now."""
        self.history.restart(rows)
        self.governor.restart(rows)
        if self.promises is not None:
            self.promises.restart(rows)
        self.decisions = np.where(rows, 0, self.decisions)
        self._overdue = self._overdue & ~rows

    def state_dict(self) -> dict[str, Any]:
        """All that the engine remembers; the networks and their snapshots are saved by their owner."""
        return to_plain(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = from_plain(self._state(), state, "the growth engine")
        self.decisions, self._overdue = values["decisions"], values["overdue"]
        self._snapshot_measurements = values["snapshot_measurements"]
        self.applied, self._assessed = self._apply_nothing(values["actions"]), None
        self.contributions_before = self.history.accuracy_contribution

    def _state(self) -> dict[str, Any]:
        return {
            "decisions": self.decisions,
            "actions": self.applied.actions,
            "overdue": self._overdue,
            "snapshot_measurements": self._snapshot_measurements,
            "history": self.history,
            "governor": self.governor,
            "promises": self.promises,
        }
