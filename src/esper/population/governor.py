"""The former address of the governor's settings."""

from __future__ import annotations

from typing import Any

from esper.engine import governor
from esper.former import warn_of_former


def __getattr__(name: str) -> Any:
    if name not in ("GovernorSettings", "Trouble"):
        raise AttributeError(
            f"esper.population.governor has no {name!r} any more: see esper.engine.governor, and esper.grower"
        )
    warn_of_former(f"esper.population.governor.{name} is in esper.engine.governor now")
    return vars(governor)[name]
