"""Plain tables for the terminal, and texts from files that are safe to print there."""

from __future__ import annotations

from rich.table import Table


def listing(*columns: str) -> Table:
    """An empty table without lines, with these columns."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="underline")
    for column in table.columns:
        column.overflow = "fold"
    return table


def printable(text: str) -> str:
    """A text as one line; what could steer a terminal is spelled out."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in text)
