"""Watching a sweep in the terminal: a table that redraws itself, or lines where there is no terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from esper.experiments.sweep import RankedTrial, SweepTrial, TrialProgress
from esper.ui.course import PACE_WINDOW, smoothed
from esper.ui.formats import duration, percent, score
from esper.ui.live import REFRESHES_PER_SECOND
from esper.ui.output import say

LINES_PER_TRIAL = 4
"""Lines about a trial's progress where there is no terminal."""


def choices_text(choices: Mapping[str, Any]) -> str:
    """``ppo.epochs=4 seed=1``; numbers with four digits."""
    parts = [f"{key}={value:.4g}" if type(value) is float else f"{key}={value}" for key, value in choices.items()]
    return " ".join(parts)


@dataclass
class _Row:
    """What is known of a trial while it goes on."""

    trial: SweepTrial
    done: int = 0
    objectives: list[float] = field(default_factory=list[float])
    paces: deque[float] = field(default_factory=lambda: deque[float](maxlen=PACE_WINDOW))
    ranked: RankedTrial | None = None

    def take(self, told: TrialProgress) -> None:
        self.done = told.done
        if told.iteration is not None:
            self.objectives.append(told.iteration.objective)
            self.paces.append(told.iteration.seconds)

    @property
    def total(self) -> int:
        return self.trial.settings.iterations

    @property
    def objective(self) -> str:
        return score(smoothed(self.objectives)[-1]) if self.objectives else ""

    @property
    def left(self) -> str:
        if self.ranked is not None:
            return "done"
        if not self.paces:
            return "waiting"
        return duration((self.total - self.done) * sum(self.paces) / len(self.paces))


class SweepView:
    """Shows a sweep that goes on; use it as a context manager."""

    def __init__(self, console: Console, trials: Sequence[SweepTrial]) -> None:
        self._rows = [_Row(trial) for trial in trials]
        self._console = console
        self._live = Live(get_renderable=self.table, console=console, refresh_per_second=REFRESHES_PER_SECOND)

    def __enter__(self) -> SweepView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def hear(self, told: TrialProgress) -> None:
        """A trial has done another iteration, or had done it before."""
        row = self._rows[told.number]
        row.take(told)
        every = max(row.total // LINES_PER_TRIAL, 1)
        if told.iteration is not None and not self._console.is_terminal and row.done % every == 0:
            say(
                self._console,
                f"{row.trial.name}: iteration {row.done}/{row.total}, J {row.objective}, {row.left} left "
                f"({choices_text(row.trial.choices)})",
            )

    def finished(self, number: int, ranked: RankedTrial) -> None:
        """A trial's policy has its score."""
        row = self._rows[number]
        row.ranked, row.done = ranked, row.total
        if not self._console.is_terminal:
            say(self._console, f"{row.trial.name}: score {score(ranked.score)} ({choices_text(row.trial.choices)})")

    def table(self) -> Table:
        """A row per trial; J is the objective of the newest rollouts, the score that of the finished policy."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="underline")
        table.add_column("trial", no_wrap=True)
        for name in ("iterations", "J", "score", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("settings")
        for row in self._rows:
            table.add_row(
                row.trial.name,
                f"{row.done}/{row.total}",
                row.objective,
                "" if row.ranked is None else score(row.ranked.score),
                row.left,
                Text(choices_text(row.trial.choices)),
            )
        return table


def ranking_table(ranking: Sequence[RankedTrial]) -> Table:
    """Best first; means over the held-out instances. Added are parameters over the host's."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="underline")
    table.add_column("trial", no_wrap=True)
    for name in ("score", "accuracy", "added"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    for one in ranking:
        figures = (score(one.score), percent(one.accuracy), percent(one.added))
        table.add_row(one.trial, *figures, Text(choices_text(one.choices)))
    return table
