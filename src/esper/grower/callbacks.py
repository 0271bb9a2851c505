"""Callbacks of a grower, which print its decisions or record them in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esper.engine.gradients import HealthTable
from esper.files import print_line
from esper.grower.decision import Decision, Ending
from esper.growth.tried import ModuleJudgement, format_signed
from esper.lifecycle.rules import Verdicts
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import Transitions
from esper.numerics.arrays import Floats
from esper.runs.metric import Metric

if TYPE_CHECKING:
    from esper.grower.grower import Grower


@dataclass(frozen=True)
class DecisionRecord:
    """A decision with the measurements that it was based on, and the slots before and after it."""

    decision: Decision
    train_loss: float
    train_accuracy: float | None
    """Accuracy in training; None where it is not known."""
    value_before: float
    """The metric before the rollback, if there was one; NaN where it was not measured."""
    verdicts: Verdicts
    """Verdicts of the gates ahead of the slots ``[1, S]`` when the decision was made."""
    changes: Transitions
    """Transitions by the rollback and by the decision."""
    contributions: Floats
    """Contributions of modules, ``[1, S]``, as last measured; NaN where they are not known."""
    judgements: Mapping[str, ModuleJudgement]
    """By slot: the measurements that decide whether its module is kept or pruned."""
    gradients: HealthTable
    """Gradients of modules since the last decision, ``[1, S]``."""
    evidence: Evidence
    """Evidence that the gates used, ``[1, S]``, with the decisions since each module was measured."""
    before: SeedTable
    """The slots before the decision."""
    after: SeedTable
    """The slots after it."""
    metric: Metric | None
    """The metric; None: not known yet."""
    rent: float
    """The rent of all modules together after the decision, in units of the score."""

    def __str__(self) -> str:
        """``decision 7: germinate mlp in layer2; loss 0.4123 (training 0.3987), accuracy 0.873; layer1 +0.012``."""
        decision = self.decision
        loss = f"loss {decision.loss:.4g} (training {self.train_loss:.4g}){decision.measured}"
        contributions = ", ".join(f"{slot} {format_signed(value)}" for slot, value in decision.contributions.items())
        return "; ".join(filter(None, [f"decision {decision.number}: {decision.what}", loss, contributions]))


class GrowerCallback:
    """Base class of callbacks: override the methods you need. With several processes, only the first calls them."""

    def on_start(self, grower: Grower) -> None:
        """Called when the grower was made; a saved state may be loaded later."""

    def on_resume(self, grower: Grower, state: dict[str, Any] | None) -> None:
        """Called when a saved state was loaded; ``state`` is this callback's saved `state_dict`, if any."""

    def on_step_start(self, grower: Grower) -> None:
        """Called before each decision."""

    def on_decision(self, grower: Grower, record: DecisionRecord) -> None:
        """Called after each decision was applied."""

    def on_failure(self, grower: Grower, error: Exception) -> None:
        """Called when training diverged and no rollbacks are left."""

    def on_finish(self, grower: Grower, ending: Ending) -> None:
        """Called by `Grower.finish`, after unfinished modules were kept or pruned."""

    def on_close(self, grower: Grower) -> None:
        """Called by `Grower.close`; no more decisions follow."""

    def state_dict(self) -> dict[str, Any]:
        """State to save with the grower, as plain values."""
        return {}


class PrintDecisions(GrowerCallback):
    """Prints one line per decision, and at the end one line per module tried."""

    def on_decision(self, grower: Grower, record: DecisionRecord) -> None:
        """Print the decision and its measurements."""
        print_line(str(record))

    def on_finish(self, grower: Grower, ending: Ending) -> None:
        """Print the modules tried and their outcomes."""
        print_line("\n".join(ending.lines))
