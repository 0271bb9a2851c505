"""What a grower decided, for the person who trains."""

from __future__ import annotations

from dataclasses import dataclass

from esper.lifecycle.actions import Op
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Cause
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
    """By slot: accuracy with the seed less accuracy without it, as last measured."""
    rollback: Rollback | None
    """What the governor did before the decision, if anything."""

    def __str__(self) -> str:
        what = self.op.name.lower()
        where = "" if self.slot is None else f" {self.blueprint} in {self.slot}" if self.blueprint else f" {self.slot}"
        undone = "" if self.rollback is None else f" after a rollback ({self.rollback.trouble.name.lower()})"
        return f"decision {self.number}: {what}{where}{undone}"
