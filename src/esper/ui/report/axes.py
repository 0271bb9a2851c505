"""Scales with round ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SMALLEST_STEP, LARGEST = 1e-5, 1e6
"""Between which ticks are written without an exponent."""
MOST_DIGITS = 17
ROUND_FACTORS = (1.0, 2.0, 2.5, 5.0)


@dataclass(frozen=True)
class Axis:
    """A linear scale from its first tick to its last."""

    ticks: tuple[float, ...]

    @property
    def low(self) -> float:
        """Value at the start."""
        return self.ticks[0]

    @property
    def high(self) -> float:
        """Value at the end."""
        return self.ticks[-1]

    def share(self, value: float) -> float:
        """Where the value lies, 0 at the start and 1 at the end."""
        return (value - self.low) / (self.high - self.low)

    def label(self, value: float) -> str:
        """With as many decimals as the ticks need; very small and very large ones with an exponent."""
        step = self.ticks[1] - self.ticks[0]
        kind = "f" if step >= SMALLEST_STEP and max(map(abs, self.ticks)) < LARGEST else "e"
        decimals = next(count for count in range(MOST_DIGITS) if self._exact(f".{count}{kind}"))
        return f"{value:.{decimals}{kind}}".replace("-", "\u2212")

    def _exact(self, form: str) -> bool:
        """Whether ticks that are written in that form stand where they are."""
        step = self.ticks[1] - self.ticks[0]
        inner = self.ticks if form.endswith("e") else (step,)
        return all(abs(float(format(tick, form)) - tick) < step / 1000 for tick in inner)


def axis_for(values: Iterable[float], most_ticks: int = 6) -> Axis:
    """An axis that holds all finite values, with at most so many ticks."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) / 10 or 0.5
        low, high = low - margin, high + margin
    step = next(
        step for step in _round_steps((high - low) / most_ticks) if _last(high, step) - _first(low, step) < most_ticks
    )
    return Axis(tuple(float(f"{index * step:.15g}") for index in range(_first(low, step), _last(high, step) + 1)))


def _round_steps(start: float) -> Iterator[float]:
    """Ever larger round numbers, from about ``start`` on."""
    for power in itertools.count(math.floor(math.log10(start))):
        yield from (factor * 10.0**power for factor in ROUND_FACTORS)


def _first(low: float, step: float) -> int:
    return math.floor(low / step + 1e-9)


def _last(high: float, step: float) -> int:
    return math.ceil(high / step - 1e-9)


def counting_axis(last: int, most_ticks: int = 6) -> Axis:
    """From 0 to ``last``, with round ticks between."""
    ticks = [tick for tick in axis_for((0, last), most_ticks).ticks if tick == int(tick) and tick < last]
    if len(ticks) > 1 and last - ticks[-1] < (ticks[1] - ticks[0]) / 2:
        ticks.pop()
    return Axis((*ticks, float(last)))
