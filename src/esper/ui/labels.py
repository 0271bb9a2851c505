"""Labels that keep out of each other's way."""

from __future__ import annotations

from collections.abc import Sequence


def spread_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places as little as it takes to lie ``gap`` apart, in their order, within low .. high if there is room."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [0.0] * len(places)
    floor = low
    for index in order:
        moved[index] = max(places[index], floor)
        floor = moved[index] + gap
    ceiling = high
    for index in reversed(order):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved
