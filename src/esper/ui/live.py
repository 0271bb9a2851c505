"""Watching a training run in the terminal: a panel that redraws itself, or lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from esper.experiments.iteration import Iteration
from esper.ui.course import Course, smoothed
from esper.ui.formats import duration, score
from esper.ui.output import say
from esper.ui.panel import CoursePanel

REFRESHES_PER_SECOND = 4
LINES_PER_RUN = 20
"""Lines about progress where there is no terminal, besides those about measurements and anomalies."""


class TrainingView(Protocol):
    """Shows a run that goes on; use it as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def baselines(self, levels: Mapping[str, float]) -> None:
        """The baselines' levels are known."""
        ...

    def iteration(self, iteration: Iteration) -> None:
        """An iteration has ended."""
        ...


def training_view(console: Console, course: Course) -> TrainingView:
    """A panel on a terminal, lines elsewhere."""
    return PanelView(console, course) if console.is_terminal else LineView(console, course)


class PanelView:
    """Redraws one panel in place, so that time goes on between iterations."""

    def __init__(self, console: Console, course: Course) -> None:
        self._course = course
        self._live = Live(CoursePanel(course), console=console, refresh_per_second=REFRESHES_PER_SECOND)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def baselines(self, levels: Mapping[str, float]) -> None:
        """Place them on the score's scale."""
        self._course.levels = levels

    def iteration(self, iteration: Iteration) -> None:
        """Show the newest figures at the next refresh."""
        self._course.take(iteration)


class LineView:
    """Prints a line now and then."""

    def __init__(self, console: Console, course: Course) -> None:
        self._console = console
        self._course = course
        self._every = max(course.total // LINES_PER_RUN, 1)

    def __enter__(self) -> Self:
        self._say("finding the baselines' level")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def baselines(self, levels: Mapping[str, float]) -> None:
        """One line."""
        self._course.levels = levels
        self._say("baselines: " + ", ".join(f"{name} {score(level)}" for name, level in levels.items()))

    def iteration(self, iteration: Iteration) -> None:
        """A line every few iterations, at measurements and at the end; one for each new kind of anomaly."""
        known = set(self._course.last_seen)
        self._course.take(iteration)
        due = iteration.number % self._every == 0 or iteration.probe_score is not None
        if due or iteration.number in (1, iteration.total):
            self._say(self._line(iteration))
        for anomaly in iteration.anomalies:
            if anomaly not in known:
                self._say(f"iteration {iteration.number}: anomaly {anomaly}: {anomaly.meaning}")

    def _line(self, iteration: Iteration) -> str:
        course, update = self._course, iteration.update
        parts = [
            f"iteration {iteration.number}/{iteration.total}",
            f"J {score(smoothed(course.objectives)[-1])}",
            f"accuracy {score(iteration.accuracy)}",
            f"added {iteration.added:.2f}",
            f"entropy {update.entropy:.2f}",
            f"KL {update.kl:.3f}",
            f"{course.steps_per_second or 0:.0f} steps/s",
            f"{duration(course.left or 0)} left",
        ]
        if iteration.rollbacks:
            parts.append(f"{iteration.rollbacks} rolled back")
        best = course.best_baseline
        if iteration.probe_score is not None:
            against = f" (best baseline {best[0]} {score(best[1])})" if best else ""
            parts.insert(1, f"greedy policy {score(iteration.probe_score)}{against}")
        return ", ".join(parts)

    def _say(self, line: str) -> None:
        say(self._console, line)
