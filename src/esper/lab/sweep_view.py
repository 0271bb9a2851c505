"""Watching a sweep in the terminal: a table that redraws itself, or lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from esper.dash.formats import duration, percent, score
from esper.dash.output import plain_table, say
from esper.dash.progress import REFRESHES_PER_SECOND, TrainingProgress
from esper.lab.sweep import RankedTrial, SweepTrial, TrialProgress

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
    progress: TrainingProgress
    ranked: RankedTrial | None = None

    @property
    def objective(self) -> str:
        return score(self.progress.objectives[-1]) if self.progress.objectives else ""

    @property
    def left(self) -> str:
        if self.ranked is not None:
            return "done"
        return "waiting" if self.progress.left is None else duration(self.progress.left)


class SweepView:
    """Shows a sweep that goes on; use it as a context manager."""

    def __init__(self, console: Console, trials: Sequence[SweepTrial]) -> None:
        self._rows = [_Row(trial, TrainingProgress(trial.settings.iterations)) for trial in trials]
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
        progress = row.progress
        progress.done = told.done
        if told.iteration is None:
            return
        progress.add(told.iteration)
        if not self._console.is_terminal and progress.done % max(progress.total // LINES_PER_TRIAL, 1) == 0:
            say(
                self._console,
                f"{row.trial.name}: iteration {progress.done}/{progress.total}, J {row.objective}, {row.left} left "
                f"({choices_text(row.trial.choices)})",
            )

    def conclude(self, number: int, ranked: RankedTrial) -> None:
        """A trial's policy has its score."""
        row = self._rows[number]
        row.ranked, row.progress.done = ranked, row.progress.total
        if not self._console.is_terminal:
            say(self._console, f"{row.trial.name}: score {score(ranked.score)} ({choices_text(row.trial.choices)})")

    def table(self) -> Table:
        """A row per trial; J is the objective of the newest rollouts, the score that of the finished policy."""
        table = _trials_table("iterations", "J", "score", "left")
        for row in self._rows:
            table.add_row(
                row.trial.name,
                f"{row.progress.done}/{row.progress.total}",
                row.objective,
                "" if row.ranked is None else score(row.ranked.score),
                row.left,
                Text(choices_text(row.trial.choices)),
            )
        return table


def ranking_table(ranking: Sequence[RankedTrial]) -> Table:
    """Best first; means over the held-out instances. Added are parameters over the host's."""
    table = _trials_table("score", "accuracy", "added")
    for one in ranking:
        figures = (score(one.score), percent(one.accuracy), percent(one.added))
        table.add_row(one.trial, *figures, Text(choices_text(one.choices)))
    return table


def _trials_table(*figures: str) -> Table:
    table = plain_table("trial", *figures, "settings")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for column in table.columns[1:-1]:
        column.justify = "right"
    return table
