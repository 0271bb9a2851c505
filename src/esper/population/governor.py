"""The former address of the governor's settings; it goes in version 0.4."""

from __future__ import annotations

import warnings
from typing import Any

from esper.engine import governor


def __getattr__(name: str) -> Any:
    if name not in ("GovernorSettings", "Trouble"):
        raise AttributeError(
            f"esper.population.governor has no {name!r} any more: see esper.engine.governor, and esper.grower"
        )
    warnings.warn(f"esper.population.governor.{name} is in esper.engine.governor now", DeprecationWarning, stacklevel=2)
    return vars(governor)[name]
