"""Modules that growth has tried: when and by what each was kept or pruned, and the measurements that decided it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from esper.errors import plural


@dataclass(frozen=True)
class ModuleJudgement:
    """The measurements that decided to keep or prune a module: contribution to the score, and effect on the loss."""

    contribution: float | None
    """Contribution to the score; None if not measured, as for a module that does not affect the output yet."""
    error: float | None
    """Standard error of the contribution; None if unknown."""
    price: float
    """The module's part of the rent."""
    threshold: float | None
    """Minimum contribution to keep the module, including its price; None without a threshold, as with a trained
    policy."""
    loss_gain: float | None = None
    """Rise of the validation loss without the module, as a share of the loss with it; None if not measured."""
    loss_error: float | None = None
    """Standard error of ``loss_gain``; None if unknown."""
    loss_threshold: float | None = None
    """Minimum ``loss_gain`` to keep the module; None if only the score decides."""
    note: str = ""
    """Another reason for the outcome, such as that the module did not affect the output yet; usually empty."""

    def __str__(self) -> str:
        """``contribution +0.016 ± 0.004, rent 0, minimum 0; loss 1.2% ± 0.3% higher without it, minimum 0.3%``."""
        error = "" if self.error is None else f" ± {self.error:.2g}"
        if self.contribution is None:
            return self.note or "contribution not measured"
        minimum = "" if self.threshold is None else f", minimum {format_signed(self.threshold)}"
        loss = ""
        if self.loss_gain is not None and self.loss_threshold is not None:
            direction = "higher" if self.loss_gain >= 0 else "lower"
            loss_error = "" if self.loss_error is None else f" ± {self.loss_error:.2%}"
            share = f"{abs(self.loss_gain):.2%}{loss_error} {direction}"
            loss = f"; loss {share} without it, minimum {self.loss_threshold:.2%}"
        note = f"; {self.note}" if self.note else ""
        return f"contribution {format_signed(self.contribution)}{error}, rent {self.price:.3g}{minimum}{loss}{note}"


@dataclass(frozen=True)
class TriedModule:
    """A module that was planted, and its outcome. Decisions are numbered from 1."""

    slot: str
    blueprint: str
    parameters: int
    """Number of scalars."""
    planted: int
    """Decision that planted it."""
    judged: int | None = None
    """Decision that kept or pruned it, or the last decision of growth; None while it is on probation."""
    kept: bool | None = None
    """Whether it was kept permanently; None until decided."""
    by: str = ""
    """What kept or pruned it: the controller's name; ``gate`` (its output was not finite); ``governor`` (a rollback);
    ``constraint`` (one was broken); or ``finish``."""
    judgement: ModuleJudgement | None = None
    """The measurements that decided; None if it was rolled back or not judged."""

    @property
    def outcome(self) -> str:
        """``kept``, ``pruned`` or ``on probation``."""
        return {True: "kept", False: "pruned", None: "on probation"}[self.kept]

    def __str__(self) -> str:
        """``pruned mlp in u2 at decision 9 by look: contribution +0.016, ... (planted at decision 4, ...)``."""
        when = "" if self.judged is None else f" at decision {self.judged} by {self.by}"
        figures = "" if self.judgement is None else f": {self.judgement}"
        planted = f"planted at decision {self.planted}, {plural(self.parameters, 'parameter')}"
        return f"{self.outcome} {self.blueprint} in {self.slot}{when}{figures} ({planted})"


def count_tried(tried: Sequence[TriedModule]) -> str:
    """The numbers of modules tried and kept, as text: ``2 modules tried, 0 kept``."""
    kept = sum(module.kept is True for module in tried)
    unsettled = sum(module.kept is None for module in tried)
    return f"{plural(len(tried), 'module')} tried, {kept:,} kept{f', {unsettled:,} on probation' if unsettled else ''}"


def format_signed(value: float) -> str:
    """Three digits with a sign: ``+0.016``; zero has none."""
    return f"{value:+.3g}" if value else "0"


def read_figure(value: float) -> float | None:
    """The value, or None if it is NaN, which means unknown."""
    return None if math.isnan(value) else value
