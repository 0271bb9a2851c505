"""The lifecycle with every choice open, which most tests of it want."""

from __future__ import annotations

from typing import Any

from esper.experiments.open_rules import OPEN_RULES
from esper.lifecycle.rules import Rules


def open_rules(**changes: Any) -> Rules:
    """Every operation, tempo, alpha target, speed and curve, a cooldown of 1, 5 and 1 steps; with changes."""
    return Rules(**{**OPEN_RULES.model_dump(), "cooldown": (1, 5, 1), **changes})
