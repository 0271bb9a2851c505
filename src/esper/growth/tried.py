"""Modules that growth has tried: by which figures each was kept or pruned, when, and by what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from esper.errors import plural


@dataclass(frozen=True)
class ModuleJudgement:
    """The figures by which a module was kept or pruned: its contribution to the score, and its effect on the loss."""

    contribution: float | None
    """Measured contribution; None where it was not measured, as of a module that does not count yet."""
    error: float | None
    """Standard error of the contribution; None where it is not known."""
    price: float
    """What the module adds to the rent."""
    threshold: float | None
    """Contribution from which the module is kept, its price included; None where no threshold decides, as under a
    trained policy."""
    loss_gain: float | None = None
    """How much lower the validation loss is with the module, as a share of the loss; None where not measured."""
    loss_error: float | None = None
    """Standard error of ``loss_gain``; None where it is not known."""
    loss_threshold: float | None = None
    """``loss_gain`` from which the module is kept; None where only the score decides."""
    note: str = ""
    """What settled the matter if it was not the figures, such as that the module did not count yet; mostly empty."""

    def __str__(self) -> str:
        """``contribution +0.016 ± 0.004, rent 0, kept from 0; loss lower by 1.2% ± 0.3%, kept from 0.3%``."""
        error = "" if self.error is None else f" ± {self.error:.2g}"
        if self.contribution is None:
            return self.note or "contribution not measured"
        kept_from = "" if self.threshold is None else f", kept from {format_signed(self.threshold)}"
        loss = ""
        if self.loss_gain is not None and self.loss_threshold is not None:
            direction = "lower" if self.loss_gain >= 0 else "higher"
            loss_error = "" if self.loss_error is None else f" ± {self.loss_error:.2%}"
            loss = f"; loss {direction} by {abs(self.loss_gain):.2%}{loss_error}, kept from {self.loss_threshold:.2%}"
        note = f"; {self.note}" if self.note else ""
        return f"contribution {format_signed(self.contribution)}{error}, rent {self.price:.3g}{kept_from}{loss}{note}"


@dataclass(frozen=True)
class TriedModule:
    """A module that was planted, and what became of it; decisions are numbered from 1."""

    slot: str
    blueprint: str
    parameters: int
    """Number of scalars."""
    planted: int
    """Decision with which it was planted."""
    judged: int | None = None
    """Decision with which it was kept or pruned, or after which growth ended; None while it is on trial."""
    kept: bool | None = None
    """Whether it was kept for good; None until that is settled."""
    by: str = ""
    """What kept or pruned it: the controller by name; ``gate``, if its output was not finite; ``governor``, by a
    rollback; ``constraint``, where one was broken; or ``finish``."""
    judgement: ModuleJudgement | None = None
    """The figures by which it was kept or pruned; None if it was rolled back, or has not been judged."""

    @property
    def outcome(self) -> str:
        """``kept``, ``pruned`` or ``on trial``."""
        return {True: "kept", False: "pruned", None: "on trial"}[self.kept]

    def __str__(self) -> str:
        """``pruned mlp in u2 at decision 9 by look: contribution +0.016, ... (planted at decision 4, ...)``."""
        when = "" if self.judged is None else f" at decision {self.judged} by {self.by}"
        figures = "" if self.judgement is None else f": {self.judgement}"
        planted = f"planted at decision {self.planted}, {plural(self.parameters, 'parameter')}"
        return f"{self.outcome} {self.blueprint} in {self.slot}{when}{figures} ({planted})"


def count_tried(tried: Sequence[TriedModule]) -> str:
    """How many modules were tried and kept: ``2 modules tried, 0 kept``."""
    kept = sum(module.kept is True for module in tried)
    unsettled = sum(module.kept is None for module in tried)
    return f"{plural(len(tried), 'module')} tried, {kept:,} kept{f', {unsettled:,} on trial' if unsettled else ''}"


def format_signed(value: float) -> str:
    """Three digits with a sign: ``+0.016``; zero has none."""
    return f"{value:+.3g}" if value else "0"


def read_figure(value: float) -> float | None:
    """The value, or None if it is NaN: not known."""
    return None if math.isnan(value) else value
