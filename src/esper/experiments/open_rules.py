"""Rules for what has to work whatever is chosen: benchmarks, exploits, the doctor's self test."""

from __future__ import annotations

from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, Curve, Op
from esper.lifecycle.rules import Rules

OPEN_RULES = Rules(
    operations=tuple(Op),
    tempos=TEMPOS,
    alpha_targets=ALPHA_TARGETS,
    alpha_speeds=ALPHA_SPEEDS,
    alpha_curves=tuple(Curve),
)
"""Every operation, tempo, alpha target, speed and curve; all else by default."""
