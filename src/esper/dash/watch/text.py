"""Decisions, figures, events and the stages of slots, as a terminal shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from rich.text import Text

from esper.dash import formats
from esper.dash.formats import score
from esper.dash.run_view import Fields, NetworkView, RunView, read_payload
from esper.dash.terminal import printable
from esper.runs.reader import EventRecord

GLYPHS = {
    "dormant": ("·", "bright_black"),
    "germinated": ("▁", "white"),
    "training": ("▂", "yellow"),
    "blending": ("▄", "dark_orange"),
    "holding": ("▆", "dodger_blue1"),
    "fossilized": ("█", "green3"),
    "pruned": ("x", "red"),
    "embargoed": ("-", "bright_black"),
    "resetting": ("-", "bright_black"),
}
"""Glyph and style by stage; the higher the block, the further the seed. They are told apart also without colour."""
_UNKNOWN = ("?", "")
_LEGEND = ("germinated", "training", "blending", "holding", "fossilized", "pruned")
_PLACE = ("iteration", "episode", "environment", "step")
"""Fields of a payload that have columns of their own."""
_WHERE, _TYPE = 13, 20
"""Columns of an event's place and type."""
EVENT_HEAD = f"{'time':<8}  {'iter:net:step':<{_WHERE}}  {'type':<{_TYPE}}  fields"


def amount(value: float) -> str:
    """A whole number as such, another with three decimals."""
    return f"{value:,.0f}" if value == round(value) else score(value)


def measure(value: Any) -> str:
    """As `formats.measure`; a dash for what is not known, or no number."""
    return formats.measure(value) if isinstance(value, int | float) else "-"


def difference(value: Any) -> str:
    """As `formats.difference`; nothing for what was not measured."""
    return formats.difference(value) if isinstance(value, int | float) else ""


def as_float(value: Any) -> float:
    """A stored number, which is a text or None where it is not finite."""
    return math.nan if value is None else float(value)


def decision_text(step: Fields, view: RunView) -> str:
    """What was done to which slot: ``germinate layer0 norm``."""
    return printable(" ".join(filter(None, [step["op"], view.slot(step.get("slot")), step.get("blueprint")])))


def event_line(record: EventRecord, view: RunView) -> str:
    """An event in one line: when, of which iteration and network, what, and its fields."""
    fields = read_payload(record.payload)
    network = fields.get("environment")
    where = f"{record.iteration}" if network is None else f"{record.iteration}:{network}:{fields.get('step')}"
    told = ", ".join(_field(name, value, view) for name, value in fields.items() if name not in _PLACE)
    moment = datetime.fromtimestamp(record.time).astimezone()
    return printable(f"{moment:%H:%M:%S}  {where:<{_WHERE}}  {record.type:<{_TYPE}}  {told}")


def _field(name: str, value: Any, view: RunView) -> str:
    if name == "slot" and isinstance(value, int):
        return f"slot {view.slot(value)}"
    if isinstance(value, float):
        return f"{name} {value:.4g}"
    return f"{name} {value if isinstance(value, str) else json.dumps(value)}"


def stages_of(network: NetworkView, slot: int) -> list[str]:
    """The stages of a slot, by decision."""
    return [step["stages"][slot] for step in network.decisions if slot < len(step["stages"])]


def stage_text(name: str) -> Text:
    """A stage by name, in its colour."""
    return Text(printable(name), GLYPHS[name][1] if name in GLYPHS else "")


def stage_lane(stages: Sequence[str], total: int, width: int) -> Text:
    """The stages of one slot, of ``total`` steps to come in all, in at most ``width`` columns.

    Where steps share a column, the last of them is shown.
    """
    steps = max(total, len(stages))
    columns = min(steps, width)
    known: list[str] = []
    for column in range(columns):
        begin, end = column * steps // columns, (column + 1) * steps // columns
        if begin >= len(stages):
            break
        known.append(stages[min(end, len(stages)) - 1])
    text = Text(no_wrap=True)
    for (glyph, style), same in groupby(GLYPHS.get(stage, _UNKNOWN) for stage in known):
        text.append(glyph * len(list(same)), style)
    text.append(" " * (columns - len(known)))
    return text


def stage_legend() -> Text:
    """What the glyphs mean."""
    return Text("  ").join(Text.assemble(GLYPHS[stage], f" {stage}") for stage in _LEGEND).append("  - cooldown")
