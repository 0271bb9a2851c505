"""Seeds' lives of one network.

The view ``seeds`` says the same of a whole run, which it has to read for it: too slow to ask every second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_MARKED = {
    "germinated": "germinated",
    "training": "trained",
    "blending": "blended",
    "holding": "held",
    "fossilized": "fossilized",
    "pruned": "pruned",
}
"""Column of the step at which a seed first came to a stage."""


def lives(transitions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per seed, in the order of their births, from a network's changes of stage in order."""
    rows: list[dict[str, Any]] = []
    current: dict[int, dict[str, Any]] = {}
    for change in transitions:
        slot, stage = change.get("slot"), change.get("after")
        if not isinstance(slot, int):
            continue
        if stage == "germinated" or change.get("cause") == "start":
            current[slot] = {
                "slot": slot,
                "blueprint": change.get("blueprint"),
                "germinated": change.get("step"),
                "outcome": "unfinished",
            }
            rows.append(current[slot])
        life = current.get(slot)
        if life is None:
            continue
        for name, column in _MARKED.items():
            if stage == name:
                life.setdefault(column, change.get("step"))
        if stage in ("fossilized", "pruned"):
            life |= {"outcome": stage, "cause": change.get("cause"), "contribution": change.get("contribution")}
    return rows
