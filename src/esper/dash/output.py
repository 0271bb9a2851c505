"""What commands print: lines, tables and JSON, and how much is done and about how long the rest takes.

Progress is a bar on a terminal, and regular lines elsewhere.
"""

import json
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from esper.config.loading import SettingDifference
from esper.dash.formats import duration

SECONDS_BETWEEN_LINES = 15.0
"""The longest time without a line where there is no terminal: below 20 also where all cores are busy."""
PACE_WINDOW = 8
"""Reports over which the pace is averaged."""
BAR_WIDTH = 12


def console_beside(machine_readable: bool) -> Console:
    """The console for text: stderr if stdout has machine-readable output."""
    return Console(stderr=machine_readable)


def print_line(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, without colours or markup."""
    _print_plainly(console, line)
    for reporter in _open:
        reporter.postpone()


def _print_plainly(console: Console, line: str) -> None:
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_differences(console: Console, title: str, differences: Sequence[SettingDifference]) -> None:
    """Print how settings differ from the defaults, one line per key."""
    print_line(console, f"{title}: {'different from the defaults in' if differences else 'the defaults'}")
    for difference in differences:
        print_line(console, f"  {difference}")


def print_json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    sys.stdout.write(f"{json.dumps(record)}\n")


def plain_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table without borders; the columns of ``numbers`` are aligned at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="underline")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


class Clock:
    """Time, as the reporter measures it and waits for it; tests replace it."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, ended: threading.Event, seconds: float) -> bool:
        """Wait for the event, but no longer; whether it happened."""
        return ended.wait(seconds)


@dataclass
class Phase:
    """A part of a command. Other threads read it: what changes together is replaced at once."""

    console: Console
    name: str
    total: float | None
    """How much there is to do, in the unit of the reports; None: not known."""
    marks: tuple[tuple[float, float], ...]
    """When how much was done: the beginning and the latest reports."""
    bar: Progress | None = None

    def describe(self, now: float, elapsed: float) -> str:
        """``3 of 10 done, 1:05 elapsed, about 2:20 left``."""
        text, total, marks = f"{duration(elapsed)} elapsed", self.total, self.marks
        if total is None:
            return text
        (first, before), (last, done) = marks[0], marks[-1]
        estimate = "time left not known yet"
        if done > before:
            # What is under way takes as long as it has taken already, or longer. The time since the last report is
            # subtracted, so that the estimate runs down between reports.
            pace = max((last - first) / (done - before), (now - first) / (done - before + 1))
            estimate = f"about {duration(max((total - done) * pace - (now - last), 0.0))} left"
        amounts = (f"{amount:,.1f}".removesuffix(".0") for amount in (done, total))
        return f"{' of '.join(amounts)} done, {text}, {estimate}"


class ProgressReporter:
    """Reports the progress of a command; `report_progress` opens its phases.

    Where a phase's console is not a terminal, a line is printed whenever `SECONDS_BETWEEN_LINES` passed without one; a
    terminal has a bar.
    """

    def __init__(self, console: Console, name: str, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._start = self._clock.now()
        self._phase = Phase(console, name, None, ((self._start, 0.0),))
        self._due = self._start + SECONDS_BETWEEN_LINES
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_regularly, name="progress lines", daemon=True)

    def __enter__(self) -> Self:
        _open.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        _open.remove(self)

    @contextmanager
    def open_phase(self, console: Console, name: str, total: float | None) -> Generator[None]:
        """A phase: lines are about it and go to its console, on which a terminal has a bar."""
        outer, phase = self._phase, Phase(console, name, total, ((self._clock.now(), 0.0),))
        self._phase = phase
        try:
            if not console.is_terminal:
                yield
                return
            name_column = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
            with Progress(name_column, BarColumn(BAR_WIDTH), _Amount(self, phase), console=console, expand=True) as bar:
                bar.add_task(name, total=total)
                phase.bar = bar
                yield
        finally:
            self._phase = outer

    def update(self, done: float, total: float | None = None, name: str | None = None) -> None:
        """Report how much is done, in any unit, of how much; ``name``: what is done now.

        The pace begins anew at another total, or at less than was done before.
        """
        phase, mark = self._phase, (self._clock.now(), done)
        before, total = phase.marks[-1][1], phase.total if total is None else total
        if done < before or total != phase.total:
            phase.marks = (mark,)
        elif done > before:
            phase.marks = (*phase.marks[-PACE_WINDOW:], mark)
        phase.total, phase.name = total, name or phase.name
        if phase.bar is not None:
            phase.bar.update(phase.bar.task_ids[0], completed=done, total=total, description=phase.name)

    def skip_to(self, done: float) -> None:
        """Report that so much is done without computing; the pace does not count it."""
        skipped = done - self._phase.marks[-1][1]
        self._phase.marks = tuple((moment, earlier + skipped) for moment, earlier in self._phase.marks)

    def describe_progress(self) -> str:
        """``policy, heldout instances: 3 of 10 done, 1:05 elapsed, about 2:20 left``."""
        return f"{self._phase.name}: {self.describe_amount(self._phase)}"

    def describe_amount(self, phase: Phase) -> str:
        """How much is done, the time since the command began, and about how long is left of the phase."""
        now = self._clock.now()
        return phase.describe(now, now - self._start)

    def postpone(self) -> None:
        """Restart the time until the next line, after one was printed."""
        self._due = self._clock.now() + SECONDS_BETWEEN_LINES

    def _print_regularly(self) -> None:
        while not self._clock.wait(self._ended, max(self._due - self._clock.now(), 0.0)):
            if self._clock.now() >= self._due:
                console, line = self._phase.console, self.describe_progress()
                if not console.is_terminal:
                    _print_plainly(console, line)
                self.postpone()


class _Amount(ProgressColumn):
    def __init__(self, reporter: ProgressReporter, phase: Phase) -> None:
        super().__init__(Column(no_wrap=True))
        self._reporter, self._phase = reporter, phase

    def render(self, task: Task) -> Text:
        return Text(self._reporter.describe_amount(self._phase))


_open: list[ProgressReporter] = []
"""The reporters of the commands that run in this process: at most one, unless a command calls another."""


@contextmanager
def report_progress(console: Console, name: str, total: float | None = None) -> Generator[ProgressReporter]:
    """A phase of the running command; ``total`` is in the unit of `ProgressReporter.update`, None if not known."""
    if not _open:  # called by other than the command line
        with ProgressReporter(console, name), report_progress(console, name, total) as reporter:
            yield reporter
        return
    reporter = _open[-1]
    with reporter.open_phase(console, name, total):
        yield reporter
