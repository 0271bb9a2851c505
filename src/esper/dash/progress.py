"""How far a training run is, how fast it goes, and its newest figures: what is shown while it goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from esper.rl.diagnostics import Anomaly
from esper.train.iteration import Iteration

SMOOTHING = 5
"""Iterations that the smoothed J is the mean of, in terminal, report and figures."""
PACE_WINDOW = 8
"""Iterations over which speed is averaged."""


def moving_average(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, `SMOOTHING` values at most."""
    return [fmean(values[max(0, end - SMOOTHING) : end]) for end in range(1, len(values) + 1)]


@dataclass
class TrainingProgress:
    """A run's iterations as they come in; all times in seconds of ``clock``."""

    total: int
    """Iterations that the run is to have."""
    objectives: list[float] = field(default_factory=list[float])
    """Mean J per iteration, as far as they are known."""
    done: int = 0
    """Iterations done, those before a resume included."""
    probe: tuple[int, float] | None = None
    """Iteration and mean test score of the greedy policy when it was last measured."""
    levels: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean score of each baseline on the same instances."""
    latest: Iteration | None = None
    last_seen: dict[Anomaly, int] = field(default_factory=dict[Anomaly, int])
    """The iteration in which each anomaly last occurred."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self._arrived = self.clock()
        self._paces: deque[tuple[int, float]] = deque(maxlen=PACE_WINDOW)
        self.done = max(self.done, len(self.objectives))

    def add(self, iteration: Iteration) -> None:
        """Add an iteration that has just ended."""
        self.latest = iteration
        self.done = iteration.number
        self._arrived = self.clock()
        self._paces.append((iteration.environment_steps, iteration.seconds))
        self.objectives.append(iteration.objective)
        if iteration.probe_score is not None:
            self.probe = (iteration.number, iteration.probe_score)
        for anomaly in iteration.anomalies:
            self.last_seen[anomaly] = iteration.number

    @property
    def elapsed(self) -> float:
        """Since this process took the run up."""
        return self.clock() - self._began

    @property
    def left(self) -> float | None:
        """Until the end at the recent pace; None before the first iteration."""
        if not self._paces:
            return None
        pace = sum(seconds for _, seconds in self._paces) / len(self._paces)
        return max((self.total - self.done) * pace - (self.clock() - self._arrived), 0.0)

    @property
    def steps_per_second(self) -> float | None:
        """Environment steps per second at the recent pace."""
        seconds = sum(seconds for _, seconds in self._paces)
        return sum(steps for steps, _ in self._paces) / seconds if seconds else None
