"""Numbers as text, formatted the same in the terminal and in the report."""

import math

MINUS = "\u2212"
EN_DASH = "\u2013"
MEGA = 1e6


def score(value: float) -> str:
    """Format a score with three decimals: ``0.655``."""
    return _true_minus(f"{value:.3f}")


def measure(value: float) -> str:
    """Format a number of any size: ``0.655``, ``12.340``, ``0.00123``, ``5.1e-05``, ``51,234``."""
    size = abs(value)
    if value and size < 0.1:
        return _true_minus(f"{value:.3g}")
    return score(value) if size < 1000 else _true_minus(f"{value:,.0f}" if size < 1e9 else f"{value:.3g}")


def signed_score(value: float) -> str:
    """Format a difference with three decimals and a sign: ``+0.021``; zero has no sign."""
    text = f"{value:+.3f}"
    return "0.000" if float(text) == 0 else _true_minus(text)


def difference(value: float) -> str:
    """Format a difference as `measure` does, with a sign: ``+0.00023``; zero has no sign."""
    return f"+{measure(value)}" if value > 0 else measure(value)


def percent(share: float) -> str:
    """Format a share in percent: ``12%``; a positive share that would round to zero: ``<1%``."""
    text = _true_minus(f"{share:.0%}")
    return "<1%" if share > 0 and text == "0%" else text


def signed_percent(share: float) -> str:
    """Format a share as `percent` does, with a sign: ``+12%``."""
    return percent(share) if share < 0 else f"+{percent(share)}"


def count(value: float) -> str:
    """Format an integer in groups of three digits: ``51,234``."""
    return f"{value:,.0f}"


def mega(value: float) -> str:
    """Format a number in whole millions: ``1,234``."""
    return _true_minus(f"{value / MEGA:,.0f}")


def p_value(p: float) -> str:
    """Format a p-value with three decimals, never zero: ``<0.001``."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def duration(seconds: float) -> str:
    """Format seconds as ``3:07`` minutes or ``1:03:07`` hours."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def join_words(words: list[str]) -> str:
    """Join names as in ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def _true_minus(text: str) -> str:
    return text.replace("-", MINUS)
