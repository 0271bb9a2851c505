"""`esper bench suite`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from esper.commands.options import require_seed
from esper.experiments.bench_suite import Choice, SuiteReport, bench_suite
from esper.experiments.settings import TrainSettings
from esper.experiments.workers import LocalWorkers
from esper.ui.output import console_beside, print_json

WORKERS = 2


def command(
    suite: Annotated[str, tyro.conf.Positional] = "tokens",
    search: int = 6,
    score: int = 16,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Measure how much control a suite rewards: its context-oracle gap, with the best fixed schedules.

    Args:
        suite: Name of the suite.
        search: Instances per variant on which schedules are chosen.
        score: Fresh instances per variant on which the chosen ones are scored.
        seed: Draws the instances.
        json: Print a machine-readable last line.
    """
    require_seed(seed)
    began = time.perf_counter()
    rules = TrainSettings(suite=suite).rules
    with LocalWorkers(WORKERS) as workers:
        report = bench_suite(suite, rules, search, score, seed, workers)
    _print(console_beside(json), report, time.perf_counter() - began)
    if json:
        print_json(asdict(report))


def _print(console: Console, report: SuiteReport, seconds: float) -> None:
    for title, choices in (("family", report.families), ("variant", report.variants)):
        console.print(_table(title, choices, report.overall))
    console.print(f"nothing {report.nothing_score:.3f}; best fixed schedule overall {report.overall_score:.3f}")
    console.print(
        f"context-oracle gap by family {report.context_oracle_gap:.3f} (standard error {report.standard_error:.3f}), "
        f"by variant {report.variant_gap:.3f} ({report.variant_standard_error:.3f}); "
        f"{report.schedules} schedules, {report.episodes} episodes, {seconds:.0f} s"
    )


def _table(title: str, choices: list[Choice], overall: str) -> Table:
    table = Table(title=f"best fixed schedule per {title}")
    for column in (title, "best schedule", "score", f"overall best ({overall})", "nothing"):
        table.add_column(column)
    for one in choices:
        numbers = (one.score, one.score_of_overall, one.score_of_nothing)
        table.add_row(one.context, one.schedule, *(f"{number:.3f}" for number in numbers))
    return table
