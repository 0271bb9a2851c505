"""What a grower has tried so far: every module that it planted, and the best candidate that it saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from esper.control.controller import CandidateRating
from esper.control.rules import Never
from esper.errors import CheckpointError
from esper.grower.controllers import ALL_AT_START
from esper.grower.decision import Change, Decision
from esper.growth.model import GrowingModel
from esper.growth.tried import ModuleJudgement, TriedModule
from esper.lifecycle.actions import Op
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Cause


@dataclass(frozen=True)
class BestCandidate:
    """The candidate with the largest worth that a grower has seen."""

    slot: str
    blueprint: str
    decision: int
    """Decision at which it was seen first, from 1."""
    worth: float
    """What was left of its promise after its price."""
    threshold: float
    """Worth above which a candidate may be planted."""


class TrialLog:
    """Keeps every module that was planted with what became of it, and the best candidate."""

    def __init__(self) -> None:
        self.modules: list[TriedModule] = []
        """In the order in which they were planted."""
        self.best: BestCandidate | None = None
        """None if the controller does not rate candidates, or no promise was measured."""

    def list_pending(self) -> dict[str, ModuleJudgement]:
        """The figures by which modules are being pruned, by slot, while their alpha falls."""
        return {
            module.slot: module.judgement
            for module in self.modules
            if module.kept is None and module.judgement is not None
        }

    def record(
        self,
        decision: Decision,
        by: str,
        model: GrowingModel,
        rating: CandidateRating | None,
        blueprints: Sequence[str],
    ) -> None:
        """Add what a decision ``by`` a controller or constraint planted, and settle what it kept or pruned.

        The ``model`` is the one after it, and ``blueprints`` are those of the ``rating`` of candidates.
        """
        if rating is not None:
            worth = rating.worth[0]
            place, blueprint = divmod(int(worth.argmax()), worth.shape[1])
            best = float(worth[place, blueprint])
            if math.isfinite(best) and (self.best is None or best > self.best.worth):
                names = list(model.slots)[place], blueprints[blueprint]
                self.best = BestCandidate(*names, decision.number, best, rating.threshold)
        for change in decision.changes:
            seed = model.slots[change.slot].seed
            if change.after is Stage.GERMINATED and change.blueprint is not None and seed is not None:
                module = TriedModule(change.slot, change.blueprint, seed.parameter_count, decision.number)
                self.modules.append(module)
            self.settle((change,), decision.number, by)
        # A module that is pruned slowly is gone some decisions later, but was judged now.
        place = None if decision.op is not Op.PRUNE or decision.slot is None else self._find_last(decision.slot)
        if place is not None and self.modules[place].kept is None:
            module = self.modules[place]
            self.modules[place] = replace(module, judged=decision.number, by=by, judgement=decision.judgement)

    def settle(self, changes: Sequence[Change], decision: int, by: str) -> None:
        """Note which modules were kept and pruned, by these ``changes`` with or after a ``decision``."""
        causes = {Cause.TICK: "gate", Cause.ROLLBACK: "governor", Cause.FINISH: "finish"}
        for change in changes:
            place = self._find_last(change.slot)
            if change.after not in (Stage.FOSSILIZED, Stage.PRUNED) or place is None:
                continue
            module = self.modules[place]
            if module.judged is None or change.cause not in (Cause.TICK, Cause.FINISH):
                by_cause = causes.get(change.cause, by)
                module = replace(module, judged=decision, by=by_cause, judgement=change.judgement)
            self.modules[place] = replace(module, kept=change.after is Stage.FOSSILIZED)

    def _find_last(self, slot: str) -> int | None:
        places = (place for place in reversed(range(len(self.modules))) if self.modules[place].slot == slot)
        return next(places, None)

    def state_dict(self) -> dict[str, Any]:
        """All modules and the best candidate, as plain values."""
        return {
            "modules": [asdict(module) for module in self.modules],
            "best": None if self.best is None else asdict(self.best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        try:
            self.modules = _MODULES.validate_python(state["modules"])
            self.best = _BEST.validate_python(state["best"])
        except (KeyError, ValidationError) as error:
            raise CheckpointError("the list of tried modules in the grower's state is damaged") from error


_MODULES, _BEST = TypeAdapter(list[TriedModule]), TypeAdapter(BestCandidate | None)


def advise(trials: TrialLog, controller: str) -> tuple[str, ...]:
    """What to try next where nothing was kept, in sentences; empty if something was, or nothing ever grows."""
    if controller == Never.name or any(module.kept for module in trials.modules):
        return ()
    sentences: list[str] = []
    if trials.modules:
        sentences.append("Nothing was kept.")
    elif (best := trials.best) is not None:
        sentences.append(
            f"The best candidate was {best.blueprint} in {best.slot} at decision {best.decision}: its promise minus "
            f"its price was {best.worth:.3g}, but only candidates above {best.threshold:.3g} are planted."
        )
    options = ["more decisions, so that modules train longer", "larger blueprints or more slots"]
    if controller != ALL_AT_START:
        options.insert(0, f'controller="{ALL_AT_START}", which plants the largest module in every slot at the start')
    return (*sentences, f"Try: {'; '.join(options)}.")
