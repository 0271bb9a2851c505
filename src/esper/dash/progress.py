"""The progress of a training run: a panel on a terminal, printed lines elsewhere."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Self

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.control.learned import UNTRAINED
from esper.dash.formats import duration, percent, score
from esper.dash.output import ProgressReporter, print_line, report_progress
from esper.errors import escape_unprintable, plural
from esper.serialization import strip_prefix
from esper.train.iteration import BY_FAMILY, KEPT, OPERATIONS, UPDATE, Alarm, Iteration

SMOOTHING = 5
"""Iterations over which J is averaged, in terminal, report and figures."""
PACE_WINDOW = 8
"""Iterations over which speed is averaged."""
REFRESHES_PER_SECOND = 4
LINES_PER_RUN = 20
"""Lines about progress without a terminal, besides those about measurements and anomalies."""
WIDE = 110
"""Width from which the details are in two columns."""
RECENT = 10
"""Iterations for which an anomaly is displayed."""
MEASURING_BASELINES = "measuring baselines"
POLICY = "policy (greedy)"
POLICY_STYLE, LABEL_STYLE, WARNING_STYLE = "bold cyan", "dim", "bold yellow"
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 30
MOST_POINTS = 16
"""Largest number of measurements in a printed learning curve."""
_BESIDE_SCALE = 52
"""Columns of the terminal that names, scores and notes take beside the scale."""
_SHORTEST_SCALE, _LONGEST_SCALE = 12, 56

Row = tuple[str, RenderableType]


@dataclass
class TrainingProgress:
    """The progress of a run, shown on ``console``.

    On a terminal it is a panel for 80 columns or more. Elsewhere there is a line every few iterations, at
    measurements, at both ends of the run, and for each new kind of anomaly. Times are in seconds of ``clock``.
    """

    console: Console
    total: int
    objectives: list[float] = field(default_factory=list[float])
    done: int = 0
    """Iterations done, those before a resume included."""
    probes: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Iterations and scores of the greedy policy when it was measured, on the same instances each time."""
    levels: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean score of each baseline and of the untrained policy on the same instances."""
    latest: Iteration | None = None
    last_seen: dict[str, tuple[int, Alarm]] = field(default_factory=dict[str, tuple[int, Alarm]])
    """When each anomaly, of each head, last occurred, and its figures there."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._start = self._last_end = self.clock()
        self._paces: deque[tuple[float, float]] = deque(maxlen=PACE_WINDOW)
        self.done = max(self.done, len(self.objectives))
        self._measured = ""
        self._shown = ExitStack()
        self._reporter: ProgressReporter | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._shown.enter_context(Live(self, console=self.console, refresh_per_second=REFRESHES_PER_SECOND))
        else:
            print_line(self.console, MEASURING_BASELINES)
            self._reporter = self._shown.enter_context(report_progress(self.console, MEASURING_BASELINES))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def count_baseline_tasks(self, done: int, total: int) -> None:
        """Report how many of the measurements of baselines are done."""
        self._measured = f": {done} of {total}"
        if self._reporter:
            self._reporter.update(done, total)

    def add_levels(self, levels: Mapping[str, float], probes: Sequence[tuple[int, float]] = ()) -> None:
        """The baselines have been measured; ``probes`` are the measurements of the policy so far."""
        self.levels, self.probes = levels, list(probes)
        if self._reporter:
            self._reporter.update(self.done, self.total, "training, in iterations")
            named = ", ".join(f"{name} {score(level)}" for name, level in levels.items())
            print_line(self.console, f"baselines: {named}")

    def add(self, iteration: Iteration) -> None:
        earlier_anomalies = set(self.last_seen)
        self.latest = iteration
        self.done = iteration.number
        self._last_end = self.clock()
        figures = iteration.figures
        self._paces.append((figures["environment_steps"], figures["seconds"]))
        self.objectives.append(figures["objective"])
        if "probe_score" in figures:
            self.probes.append((iteration.number, figures["probe_score"]))
        for alarm in iteration.anomalies:
            self.last_seen[alarm.label] = iteration.number, alarm
        if self._reporter:
            self._reporter.update(iteration.number)
            due = iteration.number % max(self.total // LINES_PER_RUN, 1) == 0 or "probe_score" in figures
            if due or iteration.number in (1, iteration.total):
                print_line(self.console, _describe_iteration(self, iteration))
            for alarm in iteration.anomalies:
                if alarm.label not in earlier_anomalies:
                    print_line(self.console, f"iteration {iteration.number}: anomaly {alarm.label}: {alarm.describe()}")

    @property
    def elapsed(self) -> float:
        return self.clock() - self._start

    @property
    def left(self) -> float | None:
        """Seconds until the end at the recent pace; None before the first iteration."""
        if not self._paces:
            return None
        # Less the time since the last iteration ended, so that the estimate runs down between iterations.
        pace = sum(seconds for _, seconds in self._paces) / len(self._paces)
        return max((self.total - self.done) * pace - (self.clock() - self._last_end), 0.0)

    @property
    def steps_per_second(self) -> float | None:
        seconds = sum(seconds for _, seconds in self._paces)
        return sum(steps for steps, _ in self._paces) / seconds if seconds else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width

        # The bar, and the time that is left at the recent pace.
        left = "" if self.left is None else f", {duration(self.left)} left"
        line = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None):
            line.add_column(ratio=ratio, no_wrap=True)
        line.add_row(
            Text(f"iteration {self.done}/{self.total}", "bold"),
            ProgressBar(total=self.total, completed=self.done),
            f"{duration(self.elapsed)} elapsed{left}",
        )
        yield line
        yield Text()

        # The policy among the baselines.
        if not self.levels:
            yield Text(f"{MEASURING_BASELINES}{self._measured} ...", LABEL_STYLE)
            return
        yield _draw_scores(self, width)

        # Details of the newest iteration, and recent anomalies.
        if self.latest is not None:
            yield Text()
            yield _draw_details(self, self.latest, width)
            for label, (last_seen, alarm) in self.last_seen.items():
                if self.done - last_seen < RECENT:
                    yield Text(f"! {label}, iteration {last_seen}: {alarm.describe()}", WARNING_STYLE)
        yield Text("Ctrl-C stops after this iteration; the run can be resumed.", LABEL_STYLE)


def moving_average(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, of at most `SMOOTHING`."""
    return [fmean(values[max(0, end - SMOOTHING) : end]) for end in range(1, len(values) + 1)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as blocks of eight heights."""
    values = values[-width:]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in values)


def _rank_scores(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """The finite scores with their names, best first."""
    return sorted(((name, level) for name, level in scores.items() if math.isfinite(level)), key=lambda row: -row[1])


def rank_baselines(levels: Mapping[str, float]) -> list[tuple[str, float]]:
    """The finite levels of the baselines, best first, without that of the untrained policy."""
    return [row for row in _rank_scores(levels) if row[0] != UNTRAINED]


def _describe_iteration(progress: TrainingProgress, iteration: Iteration) -> str:
    figures = iteration.figures
    parts = [
        f"iteration {iteration.number}/{iteration.total}",
        f"J while exploring {score(figures['objective'])}",
        f"accuracy {score(figures['accuracy'])}",
        f"added {figures['added']:.2f}",
        f"entropy {figures['ppo/entropy']:.2f}",
        f"KL {figures['ppo/kl']:.3f}",
        f"{progress.steps_per_second or 0:.0f} steps/s",
        f"{duration(progress.left or 0)} left",
    ]
    if figures["rollbacks"]:
        parts.append(f"{figures['rollbacks']:.0f} rolled back")
    if "probe_score" in figures:
        others = [f"best baseline {name} {score(level)}" for name, level in rank_baselines(progress.levels)[:1]]
        if UNTRAINED in progress.levels:
            others.append(f"untrained {score(progress.levels[UNTRAINED])}")
        comparison = f" ({', '.join(others)})" if others else ""
        parts.insert(1, f"greedy policy {score(figures['probe_score'])}{comparison}")
    return ", ".join(parts)


def _draw_scores(progress: TrainingProgress, width: int) -> Table:
    """The policy and the baselines with their scores on one scale, best first."""
    number, probe = progress.probes[-1] if progress.probes else (0, None)
    # Before the first measurement the policy is its untrained self, which is among the levels.
    policy = {POLICY: probe} if number and probe is not None else {}
    rows = [
        (name, level, f"at iteration {number}" if name == POLICY else "")
        for name, level in _rank_scores({**progress.levels, **policy})
    ]
    return _draw_on_scale("score on the same problems", rows, (POLICY,), width)


def draw_learning_curve(
    probes: Sequence[tuple[int, float]], levels: Mapping[str, float], instances: int, width: int
) -> Table:
    """The greedy policy by iteration, with the untrained policy and the best baseline, all on the same instances."""
    measured = [(f"iteration {number}", value, "") for number, value in probes if number and math.isfinite(value)]
    every = -(-len(measured) // MOST_POINTS) or 1
    shown = measured[::-1][::every][::-1]  # the last one always
    untrained = [("untrained", levels[UNTRAINED], "")] if UNTRAINED in levels else []
    best = [(f"best baseline, {name}", level, "") for name, level in rank_baselines(levels)[:1]]
    title = f"greedy policy on {plural(instances, 'training problem')}"
    return _draw_on_scale(title, [*untrained, *shown, *best], [name for name, *_ in shown], width)


def _draw_on_scale(title: str, rows: Sequence[tuple[str, float, str]], marked: Sequence[str], width: int) -> Table:
    """A row with the ends of the scale, then a row per name and score with its place on the scale, and a note."""
    levels = [level for _, level, _ in rows]
    high, low = max(levels), min(levels)
    table = Table.grid(padding=(0, 2))
    scale = max(min(width - _BESIDE_SCALE, _LONGEST_SCALE), _SHORTEST_SCALE)
    ends = Text(f"{score(low)} {'·' * (scale - 12)} {score(high)}", LABEL_STYLE, no_wrap=True)
    table.add_row(Text(title, "bold"), "", ends, "")
    for name, level, note in rows:
        style = POLICY_STYLE if name in marked else ""
        place = round((level - low) / (high - low) * (scale - 1)) if high > low else 0
        mark = Text("─" * place + "●", style, no_wrap=True)
        label = Text(escape_unprintable(name), style)
        table.add_row(label, Text(score(level), style), mark, Text(note, LABEL_STYLE))
    return table


def _draw_details(progress: TrainingProgress, latest: Iteration, width: int) -> RenderableType:
    """What the networks did and how the policy learns: in two columns, or in as few lines as possible."""
    curve = moving_average(progress.objectives)
    figures = latest.figures
    operations = [(name, percent(share)) for name, share in strip_prefix(OPERATIONS, figures).items() if share]
    growth: list[Row] = [
        (
            "J, exploring",
            Text.assemble(f"{score(curve[-1])} (mean of {SMOOTHING})  ", (sparkline(curve, SPARKS), POLICY_STYLE)),
        ),
        ("accuracy", score(figures["accuracy"])),
        ("growth", f"{percent(figures['added'])} of the host's parameters"),
        ("seeds kept", _draw_pairs((site, percent(share)) for site, share in strip_prefix(KEPT, figures).items())),
        ("operations", _draw_pairs(operations)),
        ("J by family", _draw_pairs((name, f"{j:.2f}") for name, j in strip_prefix(BY_FAMILY, figures).items())),
    ]
    update = strip_prefix(UPDATE, figures)
    health = [
        ("entropy", f"{update['entropy']:.2f}"),
        ("KL", f"{update['kl']:.4f}{', ended early' if update['stopped_early'] else ''}"),
        ("explained variance", f"{update['explained_variance']:.2f}"),
        ("clipped", percent(update["clip_fraction"])),
        ("gradient", f"{update['gradient_norm']:.2f}"),
        ("steps/s", f"{progress.steps_per_second or 0:.0f}"),
    ]
    if width < WIDE:
        return _draw_rows([*growth, ("learning", _draw_pairs(health))])
    columns = Table.grid(padding=(0, 4))
    columns.add_column(width=width * 3 // 5)
    columns.add_column()
    columns.add_row(_draw_rows(growth), _draw_rows(health))
    return columns


def _draw_rows(rows: Iterable[Row]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=LABEL_STYLE, no_wrap=True)
    table.add_column()
    for name, content in rows:
        table.add_row(name, content)
    return table


def _draw_pairs(pairs: Iterable[tuple[str, str]]) -> Columns:
    return Columns([Text(f"{name} {value}") for name, value in pairs], padding=(0, 2))
