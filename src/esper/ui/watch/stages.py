"""Stages of slots as a lane of glyphs, which tell them apart also without colour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

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
"""Glyph and style by stage; the higher the block, the further the seed."""
_UNKNOWN = ("?", "")
_LEGEND = ("germinated", "training", "blending", "holding", "fossilized", "pruned")


def lane(stages: Sequence[str], total: int, width: int) -> Text:
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


def legend() -> Text:
    """What the glyphs mean."""
    return Text("  ").join(Text.assemble(GLYPHS[stage], f" {stage}") for stage in _LEGEND).append("  - cooldown")
