"""Decisions, figures and events in a few words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

from esper.telemetry.events import StepTaken
from esper.telemetry.reader import EventRecord
from esper.ui import formats
from esper.ui.formats import score
from esper.ui.listing import printable

_PLACE = ("iteration", "episode", "environment", "step")
"""Fields of a payload that have columns of their own."""


_WHERE, _TYPE = 13, 20
"""Columns of an event's place and type."""
EVENT_HEAD = f"{'time':<8}  {'iter:net:step':<{_WHERE}}  {'type':<{_TYPE}}  fields"


def amount(value: float) -> str:
    """A whole number as such, another with three decimals."""
    return f"{value:,.0f}" if value == round(value) else score(value)


def figure(value: float | None) -> str:
    """As `formats.figure`; a dash for what is not known."""
    return "-" if value is None else formats.figure(value)


def difference(value: float | None) -> str:
    """As `formats.difference`; nothing for what was not measured."""
    return "" if value is None or not math.isfinite(value) else formats.difference(value)


def decision(step: StepTaken, slot: Callable[[int | None], str]) -> str:
    """What was done to which slot: ``germinate layer0 norm``."""
    return printable(" ".join(filter(None, [step.op, slot(step.slot), step.blueprint])))


def event_line(record: EventRecord, slot: Callable[[int | None], str]) -> str:
    """An event in one line: when, of which iteration and network, what, and its fields."""
    fields = _payload(record)
    network = fields.get("environment")
    where = f"{record.iteration}" if network is None else f"{record.iteration}:{network}:{fields.get('step')}"
    told = ", ".join(_field(name, value, slot) for name, value in fields.items() if name not in _PLACE)
    moment = datetime.fromtimestamp(record.time).astimezone()
    return printable(f"{moment:%H:%M:%S}  {where:<{_WHERE}}  {record.type:<{_TYPE}}  {told}")


def _payload(record: EventRecord) -> dict[str, Any]:
    try:
        found = json.loads(record.payload)
    except ValueError:
        return {"damaged": record.payload}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"damaged": found}


def _field(name: str, value: Any, slot: Callable[[int | None], str]) -> str:
    if name == "slot" and isinstance(value, int):
        return f"slot {slot(value)}"
    if isinstance(value, float):
        return f"{name} {value:.4g}"
    return f"{name} {value if isinstance(value, str) else json.dumps(value)}"
