"""A training run as a panel for the terminal, from 80 columns up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.experiments.iteration import Iteration
from esper.ui.course import Course, smoothed
from esper.ui.formats import duration, percent, score

WIDE = 110
"""Columns from which details stand side by side."""
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 30
RECENT = 10
"""Iterations for which an anomaly stays on display."""

POLICY = "policy (greedy)"
POLICY_STYLE = "bold cyan"
LABEL_STYLE = "dim"
WARNING_STYLE = "bold yellow"

Row = tuple[str, RenderableType]


class CoursePanel:
    """Draws a course as it is at the moment of drawing."""

    def __init__(self, course: Course) -> None:
        self.course = course

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        course = self.course
        yield _progress(course)
        yield Text()
        if not course.levels:
            yield Text("finding the baselines' level ...", LABEL_STYLE)
            return
        yield _scores(course, width)
        if course.latest is not None:
            yield Text()
            yield _details(course, course.latest, width)
            yield from _anomalies(course)
        yield Text("Ctrl-C stops after this iteration; the run can be resumed.", LABEL_STYLE)


def _progress(course: Course) -> Table:
    line = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None):
        line.add_column(ratio=ratio, no_wrap=True)
    left = "" if course.left is None else f", {duration(course.left)} left"
    line.add_row(
        Text(f"iteration {course.done}/{course.total}", "bold"),
        ProgressBar(total=course.total, completed=course.done),
        f"{duration(course.elapsed)} elapsed{left}",
    )
    return line


def _scores(course: Course, width: int) -> Table:
    """The policy among the baselines, on one scale."""
    rows = [(name, level, "") for name, level in course.levels.items()]
    if course.probe is not None:
        rows.append((POLICY, course.probe[1], f"at iteration {course.probe[0]}"))
    rows.sort(key=lambda row: row[1], reverse=True)
    levels = [level for _, level, _ in rows]
    table = Table.grid(padding=(0, 2))
    scale = min(width - 52, 56)
    title = Text("score on the same problems", "bold")
    table.add_row(title, "", Text(f"{score(min(levels))} {'·' * (scale - 12)} {score(max(levels))}", LABEL_STYLE), "")
    for name, level, note in rows:
        style = POLICY_STYLE if name == POLICY else ""
        marks = _marks(level, min(levels), max(levels), scale)
        table.add_row(Text(name, style), Text(score(level), style), Text(marks, style), Text(note, LABEL_STYLE))
    return table


def _marks(value: float, low: float, high: float, width: int) -> str:
    place = round((value - low) / (high - low) * (width - 1)) if high > low else 0
    return "─" * place + "●"


def _details(course: Course, latest: Iteration, width: int) -> RenderableType:
    """What the networks did and how the policy learns: side by side, or one below the other in as few lines as go."""
    growth, health = _growth(course, latest), _health(course, latest)
    if width < WIDE:
        return _table([*growth, ("learning", _pairs(health))])
    columns = Table.grid(padding=(0, 4))
    columns.add_column(width=width * 3 // 5)
    columns.add_column()
    columns.add_row(_table(growth), _table(health))
    return columns


def _growth(course: Course, latest: Iteration) -> list[Row]:
    curve = smoothed(course.objectives)
    used = [(name, percent(share)) for name, share in latest.operations.items() if share]
    return [
        ("J, exploring", Text.assemble(f"{score(curve[-1])}  ", (sparkline(curve, SPARKS), POLICY_STYLE))),
        ("accuracy", score(latest.accuracy)),
        ("growth", f"{percent(latest.added)} of the host's parameters"),
        ("seeds kept", _pairs((site, percent(share)) for site, share in latest.kept.items())),
        ("operations", _pairs(used)),
        ("J by family", _pairs((name, f"{value:.2f}") for name, value in latest.objective_by_family.items())),
    ]


def _health(course: Course, latest: Iteration) -> list[tuple[str, str]]:
    update = latest.update
    early = ", ended early" if update.stopped_early else ""
    return [
        ("entropy", f"{update.entropy:.2f}"),
        ("KL", f"{update.kl:.4f}{early}"),
        ("explained variance", f"{update.explained_variance:.2f}"),
        ("clipped", percent(update.clip_fraction)),
        ("gradient", f"{update.gradient_norm:.2f}"),
        ("steps/s", f"{course.steps_per_second or 0:.0f}"),
    ]


def _table(rows: Iterable[Row]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=LABEL_STYLE, no_wrap=True)
    table.add_column()
    for name, content in rows:
        table.add_row(name, content)
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Columns:
    """Names and values, which never part at a line's end."""
    return Columns([Text(f"{name} {value}") for name, value in pairs], padding=(0, 2))


def _anomalies(course: Course) -> Iterable[Text]:
    for anomaly, number in course.last_seen.items():
        if course.done - number < RECENT:
            yield Text(f"! {anomaly}, iteration {number}: {anomaly.meaning}", WARNING_STYLE)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as blocks of eight heights."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in shown)
