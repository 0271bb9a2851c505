"""A grower's decisions, the modules that it tried, and how growth ended."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from esper.control.controller import CandidateRating
from esper.control.rules import Never, compute_marginal_rents
from esper.engine.governor import Governor
from esper.engine.measurements import Evaluation
from esper.errors import CheckpointError
from esper.grower.backend import GrowingNetwork, ModelBackend
from esper.grower.config import ALL_AT_START
from esper.grower.evaluation import ESTIMATED, store_contributions
from esper.grower.governor import Rollback
from esper.growth.model import GrowingModel
from esper.growth.summary import TriedModule, count_tried
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import Reason
from esper.lifecycle.table import Figures, SeedRating, Stage
from esper.lifecycle.transitions import Cause, Transitions, concatenate_transitions, finish_growth
from esper.numerics.arrays import Bools, Floats
from esper.runs.reader import LOSS


@dataclass(frozen=True)
class Change:
    """A change of a slot's stage."""

    slot: str
    before: Stage
    after: Stage
    blueprint: str | None
    """Blueprint of the module concerned; None in a cooldown."""
    cause: Cause
    reason: Reason
    """Result of the gate before the new stage: whether the change is allowed, not whether it is useful."""
    rating: SeedRating[float | None] | None = None
    """The measurements that decided to keep or prune the module; None for other changes, and after a rollback."""


@dataclass(frozen=True)
class Decision:
    """One decision and its consequences."""

    number: int
    """Number of the decision, from 1."""
    op: Op
    slot: str | None
    """The affected slot; None for WAIT."""
    blueprint: str | None
    """Blueprint that germinated, or of the module in the affected slot; None for WAIT."""
    changes: tuple[Change, ...]
    """Changes of stage by the decision, by elapsed time, or by a rollback."""
    contributions: dict[str, float]
    """By slot, as last measured: the score with the module minus the score with the module switched off. It measures
    how much the model depends on the module. If the metric is a loss, it is the relative reduction of the loss
    (`esper.grower.scores` has the formula). Modules that are kept for good are measured at every fourth decision. With
    `esper.Refit`, a module on probation is compared with a fork that has trained without it; its slot is missing until
    the fork is old enough."""
    loss: float
    """Validation loss before the decision, and after any rollback."""
    metric: str
    """Name of the metric; empty until it is known."""
    value: float
    """Value of the metric."""
    score: float
    """Score of the same measurement; higher is better."""
    rollback: Rollback | None
    """The rollback before the decision; None if there was none."""
    finished: bool
    """Whether `esper.Grower.finished` held: stop training."""
    broken: str
    """Broken constraints and by how much; empty if none."""
    rating: SeedRating[float | None] | None = None
    """The measurements that decided to keep or prune a module; None for other operations."""

    def __str__(self) -> str:
        return f"decision {self.number}: {self.what}; loss {self.loss:.4g}{self.measured}{self.broken}"

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name, for a logger: measurements, and the number of slots that entered each stage."""
        entered = Counter(change.after.name.lower() for change in self.changes)
        return {
            "validation_loss": self.loss,
            **({f"validation_{self.metric}": self.value} if self.metric else {}),
            **{f"contribution/{slot}": value for slot, value in self.contributions.items()},
            **{f"lifecycle/{stage}": float(count) for stage, count in entered.items()},
        }

    @property
    def measured(self) -> str:
        """The metric as text to append to the loss, if it is another one."""
        return f", {self.metric} {self.value:.4g}" if self.metric not in ("", LOSS) else ""

    @property
    def what(self) -> str:
        """The decision as text, with the measurements that decided to keep or prune a module."""
        what = self.op.name.lower()
        where = "" if self.slot is None else f" {self.blueprint} in {self.slot}" if self.blueprint else f" {self.slot}"
        undone = "" if self.rollback is None else f" after a rollback ({self.rollback.trouble.name.lower()})"
        why = "" if self.rating is None else f": {self.rating}"
        return f"{what}{where}{undone}{why}{': finished' if self.finished else ''}"


def rate_modules(evaluation: Evaluation, prices: Floats, rating: SeedRating[Figures] | None) -> SeedRating[Figures]:
    """What the modules are worth as measured, by their prices ``[1, S]`` and the thresholds of a controller's rating.

    ``rating`` is None if no threshold decides.
    """
    unknown = np.full_like(prices, np.nan)
    return SeedRating(
        contribution=evaluation.accuracy_contribution,
        error=evaluation.accuracy_error,
        price=prices,
        # The controller has seen the price in single precision.
        threshold=unknown if rating is None else prices + (rating.threshold - rating.price),
        loss_gain=evaluation.divide_by_loss(evaluation.loss_contribution),
        loss_error=evaluation.divide_by_loss(evaluation.loss_error),
        loss_threshold=unknown if rating is None else rating.loss_threshold,
    )


def compute_prices(network: GrowingNetwork, rent: float) -> Floats:
    """What each module adds to the rent, ``[1, S]``; 0 in empty slots."""
    charge, table = network.charge, network.table
    return compute_marginal_rents(np.array([rent]), charge.of_slots(table), charge.added(table, table.blended))


def list_changes(
    slots: Sequence[str],
    blueprints: Sequence[str],
    changes: Transitions,
    ratings: Mapping[str, SeedRating[float | None]],
) -> tuple[Change, ...]:
    """The transitions of one model with names, and with the ``ratings`` by which modules, by slot, end."""

    def find_rating(index: int) -> SeedRating[float | None] | None:
        ends = changes.after[index] in (Stage.FOSSILIZED, Stage.PRUNED) and changes.cause[index] != Cause.ROLLBACK
        return ratings.get(slots[int(changes.slot[index])]) if ends else None

    return tuple(
        Change(
            slot=slots[int(changes.slot[index])],
            before=Stage(int(changes.before[index])),
            after=Stage(int(changes.after[index])),
            blueprint=blueprints[int(changes.blueprint[index])] if changes.blueprint[index] >= 0 else None,
            cause=Cause(int(changes.cause[index])),
            reason=Reason(int(changes.reason[index])),
            rating=find_rating(index),
        )
        for index in range(len(changes))
    )


@dataclass(frozen=True)
class Ending:
    """All modules that growth tried, and the outcome of those that were unfinished when it ended."""

    changes: tuple[Change, ...]
    """Changes of unfinished modules to FOSSILIZED or PRUNED, in the order decided, with cause FINISH. Empty if there
    were no unfinished modules."""
    contributions: dict[str, float]
    """Contributions of unfinished modules by slot, as in `Decision`, measured when they were decided on. Modules that
    did not affect the output are left out."""
    tried: tuple[TriedModule, ...] = ()
    """All modules ever planted, in order of planting, pruned ones included."""
    advice: tuple[str, ...] = ()
    """Sentences that suggest what to try next; what else to plant only if nothing was kept."""
    transitions: Transitions = field(default_factory=Transitions.none, repr=False, compare=False)
    """The changes as arrays."""

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """Lines of text: the numbers of modules tried and kept, one line per module, and the advice."""
        first = f"Finished. {count_tried(self.tried)}." if self.tried else "Finished. No module was tried."
        return [first, *map(str, self.tried), *self.advice]


@dataclass(frozen=True)
class BestCandidate:
    """The candidate with the largest worth (promise less price) that a grower has seen."""

    slot: str
    blueprint: str
    decision: int
    """Decision at which it was seen first, from 1."""
    worth: float
    threshold: float
    """Worth above which a candidate may be planted."""


class TriedModules:
    """Keeps every module that was planted with what became of it, in ``model.tried``, and the best candidate."""

    def __init__(self, model: GrowingModel, blueprints: Sequence[str]) -> None:
        self._model, self._blueprints = model, blueprints
        model.tried = ()
        self.best: BestCandidate | None = None
        """None if the controller does not rate candidates, or no promise was measured."""

    def list_pending(self) -> dict[str, SeedRating[float | None]]:
        """The figures by which modules are being pruned, by slot, while their alpha falls."""
        return {one.slot: one.rating for one in self._model.tried if one.kept is None and one.rating is not None}

    def record(self, decision: Decision, by: str, rating: CandidateRating | None) -> None:
        """Add what a decision ``by`` a controller or constraint planted, and note what it kept or pruned."""
        if rating is not None:
            worth = rating.worth[0]
            place, blueprint = divmod(int(worth.argmax()), worth.shape[1])
            best = float(worth[place, blueprint])
            if math.isfinite(best) and (self.best is None or best > self.best.worth):
                names = list(self._model.slots)[place], self._blueprints[blueprint]
                self.best = BestCandidate(*names, decision.number, best, rating.threshold)
        for change in decision.changes:
            seed = self._model.slots[change.slot].seed
            if change.after is Stage.GERMINATED and change.blueprint is not None and seed is not None:
                module = TriedModule(change.slot, change.blueprint, seed.parameter_count, decision.number)
                self._model.tried = (*self._model.tried, module)
            self.note_outcomes((change,), decision.number, by)
        # A module that is pruned slowly is gone some decisions later, but was decided on now.
        module = None if decision.op is not Op.PRUNE or decision.slot is None else self._find_last(decision.slot)
        if module is not None and module.kept is None:
            self._replace(module, replace(module, decided=decision.number, by=by, rating=decision.rating))

    def note_outcomes(self, changes: Sequence[Change], decision: int, by: str) -> None:
        """Note which modules were kept and pruned, by these ``changes`` with or after a ``decision``."""
        causes = {Cause.TICK: "gate", Cause.ROLLBACK: "governor", Cause.FINISH: "finish"}
        for change in changes:
            module = self._find_last(change.slot)
            if change.after not in (Stage.FOSSILIZED, Stage.PRUNED) or module is None:
                continue
            outcome = replace(module, kept=change.after is Stage.FOSSILIZED)
            if module.decided is None or change.cause not in (Cause.TICK, Cause.FINISH):
                outcome = replace(outcome, decided=decision, by=causes.get(change.cause, by), rating=change.rating)
            self._replace(module, outcome)

    def _find_last(self, slot: str) -> TriedModule | None:
        return next((module for module in reversed(self._model.tried) if module.slot == slot), None)

    def _replace(self, former: TriedModule, module: TriedModule) -> None:
        self._model.tried = tuple(module if one is former else one for one in self._model.tried)

    def advise(self, controller: str) -> tuple[str, ...]:
        """What to try next, in sentences; of what was measured alone if something was kept, or nothing ever grows."""
        sentences: list[str] = []
        if any(module.rating is not None and ESTIMATED in module.rating.note for module in self._model.tried):
            sentences.append(
                "Errors were estimated from how contributions vary between decisions: esper.Validation, or an evaluate "
                "that returns one value per example, measures them."
            )
        if controller == Never.name or any(module.kept for module in self._model.tried):
            return tuple(sentences)
        if self._model.tried:
            sentences.append("Nothing was kept.")
        elif (best := self.best) is not None:
            sentences.append(
                f"The best candidate was {best.blueprint} in {best.slot} at decision {best.decision}: its promise "
                f"minus its price was {best.worth:.3g}, but only candidates above {best.threshold:.3g} are planted."
            )
        options = ["more decisions, so that modules train longer", "larger blueprints or more slots"]
        if controller != ALL_AT_START:
            largest = f'controller="{ALL_AT_START}", which plants the largest module in every slot at the start'
            options.insert(0, largest)
        # What decided comes first.
        figures = [
            (rating.contribution, rating.error or 0.0, rating.price or 0.0, rating.threshold)
            for rating in (module.rating for module in self._model.tried)
            if rating is not None and rating.contribution is not None and rating.threshold is not None
        ]
        for_rent = sum(threshold - price <= gain < threshold for gain, _, price, threshold in figures)
        unclear = sum(0 < gain <= error for gain, error, _, _ in figures)
        if unclear:
            options.insert(
                0, f"more validation examples: {unclear} of {len(figures)} gained less than a standard error"
            )
        if for_rent:
            options.insert(0, f"a lower rent: {for_rent} of {len(figures)} contributed enough but for it")
        return (*sentences, f"Try: {'; '.join(options)}.")

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "modules": [asdict(module) for module in self._model.tried],
            "best": None if self.best is None else asdict(self.best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        try:
            self._model.tried = tuple(_MODULES.validate_python(state["modules"]))
            self.best = _BEST.validate_python(state["best"])
        except (KeyError, ValidationError) as error:
            raise CheckpointError("the list of tried modules in the grower's state is damaged") from error


_MODULES, _BEST = TypeAdapter(list[TriedModule]), TypeAdapter(BestCandidate | None)

_BROKEN = "not kept because a constraint is broken"
_CONSTANT = "not kept because the output is the same for all examples and the module does not lower the loss"


def resolve_unfinished(
    backend: ModelBackend, governor: Governor, rent: float, rating: SeedRating[Figures] | None, unreached: Bools
) -> Ending:
    """End growth: keep the unfinished modules that are worth it by the controller's thresholds, and prune the others.

    Without a ``rating`` a module must only contribute its rent. No gradient has reached the modules in the slots
    ``unreached``, bool ``[1, S]``. The result does not have what was tried before.
    """
    network = backend.networks
    slots = list(network.model.slots)
    parts: list[Transitions] = []

    def resolve(kept: Bools, pruned: Bools) -> None:
        table, changes = finish_growth(network.table, kept, pruned)
        network.change_slots(table, changes)
        if pruned.any():
            governor.expect_change(np.ones(1, np.bool_), forget_skill=np.zeros(1, np.bool_))
        parts.append(changes)

    # Modules that do not count yet, have learned nothing or are being pruned go first: it hardly changes what the model
    # computes.
    table = network.table
    no_slots = np.zeros(table.stage.shape, np.bool_)
    ineffective = table.live & (table.pruning | ~table.blended | (table.alpha == 0) | unreached)
    notes = np.full(table.stage.shape, "", dtype=object)
    notes[ineffective] = "had no effect yet"
    notes[ineffective & table.pruning] = "was being pruned"
    notes[ineffective & unreached] = "no gradient reached it"
    prices = compute_prices(network, rent)
    resolve(no_slots, ineffective)
    # The others may depend on each other. So the least valuable goes if it is not worth keeping, and the rest is
    # measured again, until all that are left are.
    margin = np.zeros_like(prices) if rating is None else rating.threshold - rating.price
    loss_thresholds = np.full_like(prices, np.nan) if rating is None else rating.loss_threshold
    unknown = np.full_like(prices, np.nan)
    unmeasured = SeedRating(unknown, unknown, prices, prices + margin, unknown, unknown, unknown)
    ratings = {slot: unmeasured.select(0, place, notes[0, place]) for place, slot in enumerate(slots)}
    contributions: dict[str, float] = {}
    while (live := network.table.live).any():
        evaluation = backend.measure_dependence(live)
        store_contributions(network.model, evaluation.accuracy_contribution)
        constraint_broken = bool(backend.constraints.find_broken(evaluation.metrics))
        prices = compute_prices(network, rent)
        # A module that could not be measured is worth nothing; what does too little for the loss goes first.
        worth = np.nan_to_num(evaluation.accuracy_contribution - prices - margin, nan=-math.inf)
        surplus = evaluation.divide_by_loss(evaluation.loss_contribution) - loss_thresholds
        low_gain = live & (surplus < 0)
        above_thresholds = live & ~low_gain & (worth >= 0)
        # On a model that gives one answer to everything only a loss shows what a module is worth: a score is chance.
        lowers_loss = evaluation.loss_contribution > 0
        worth_keeping = (
            above_thresholds & lowers_loss & (surplus >= 0) if evaluation.constant_output else above_thresholds
        )
        kept = live if not constraint_broken and (worth_keeping == live).all() else no_slots
        pruned = no_slots.copy()
        if not kept.any():
            candidates = live if constraint_broken else live & ~worth_keeping
            ranked = np.where(candidates, worth, math.inf)
            if low_gain.any():
                ranked = np.where(low_gain, surplus, math.inf)
            pruned.flat[ranked.argmin()] = True
        measured = replace(rate_modules(evaluation, prices, rating), threshold=prices + margin)
        for place in np.flatnonzero(live[0]).tolist():
            note = evaluation.describe_error(place)
            if pruned[0, place] and above_thresholds[0, place]:
                note = _BROKEN if constraint_broken else _CONSTANT
            ratings[slots[place]] = measured.select(0, place, note)
            contributions[slots[place]] = float(evaluation.accuracy_contribution[0, place])
        resolve(kept, pruned)
    transitions = concatenate_transitions(parts)
    changes = list_changes(slots, network.blueprints, transitions, ratings)
    in_order = {slot: contributions[slot] for slot in slots if math.isfinite(contributions.get(slot, math.nan))}
    return Ending(changes, in_order, transitions=transitions)
