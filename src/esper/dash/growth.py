"""Watching one model grow: a bar on a terminal, and a line for every decision."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from esper.dash.formats import score
from esper.dash.output import say
from esper.lifecycle.actions import Op
from esper.practice.training import Epoch


class GrowthView:
    """Where there is no terminal, one line per epoch; on one, a bar, and lines for what is more than waiting.

    Use it as a context manager.
    """

    def __init__(self, console: Console, epochs: int, done: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("growing", total=epochs, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def epoch(self, epoch: Epoch) -> None:
        """An epoch has ended."""
        figures = f"accuracy {score(epoch.validation.accuracy)}, loss {score(epoch.validation.loss)}"
        self._bar.update(self._task, completed=epoch.number, description=figures)
        decision = epoch.decision
        if not self._console.is_terminal or decision.op is not Op.WAIT or decision.rollback is not None:
            line = f"epoch {epoch.number}/{epoch.total}: {figures}, added {epoch.added_parameters}: {decision.what}"
            say(self._console, line)
