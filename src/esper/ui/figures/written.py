"""How values are written in tables."""

from __future__ import annotations

from esper.ui import formats
from esper.ui.figures.rows import Value
from esper.ui.formats import EN_DASH, percent, score, signed
from esper.ui.standings import added

# Values come from SQL or from records, so their types are known only here.


def text(value: Value) -> str:
    """As it is; a dash for what is missing."""
    return EN_DASH if value is None else str(value)


def count(value: Value) -> str:
    """A whole number, in groups of three digits."""
    return f"{value:,.0f}" if isinstance(value, int | float) else text(value)


def decimals(value: Value) -> str:
    """Three decimals."""
    return score(value) if isinstance(value, int | float) else text(value)


def figure(value: Value) -> str:
    """Of any size."""
    return formats.figure(value) if isinstance(value, int | float) else text(value)


def difference(value: Value) -> str:
    """Of any size, with a sign."""
    return formats.difference(value) if isinstance(value, int | float) else text(value)


def signed_decimals(value: Value) -> str:
    """Three decimals with a sign."""
    return signed(value) if isinstance(value, int | float) else text(value)


def share(value: Value) -> str:
    """In percent."""
    return percent(value) if isinstance(value, int | float) else text(value)


def signed_share(value: Value) -> str:
    """In percent, with a sign."""
    return added(value) if isinstance(value, int | float) else text(value)


def short(value: Value) -> str:
    """Three significant digits."""
    return f"{value:.3g}".replace("-", "\u2212") if isinstance(value, int | float) else text(value)
