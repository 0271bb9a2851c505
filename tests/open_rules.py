"""The lifecycle with every choice open, which most tests of it want, and benchmarks of what has to work anyway."""

from typing import Any

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


def open_rules(**changes: Any) -> Rules:
    """`OPEN_RULES` with a cooldown of 1, 5 and 1 steps, and changes."""
    return Rules(**{**OPEN_RULES.model_dump(), "cooldown": (1, 5, 1), **changes})
