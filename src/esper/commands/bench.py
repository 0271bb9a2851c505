"""`esper bench suite`, `esper bench search` and `esper bench train`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from esper.commands.options import require_seed
from esper.config.loading import Overrides, load_settings
from esper.control.shipped import ESPER
from esper.dash.output import RegularLines, console_beside, print_json, print_line
from esper.errors import ConfigError
from esper.lab.bench_suite import Choice, SuiteReport, bench_suite
from esper.lab.bench_train import bench_train
from esper.lab.evaluate import FEWEST_INSTANCES
from esper.lab.search import BUDGETS, POOL, SearchReport, search_beside
from esper.numerics.devices import CPU
from esper.tasks.registry import get_suite
from esper.train.settings import TrainSettings
from esper.train.workers import LocalWorkers

WORKERS = 2
ITERATIONS = 3


def measure_suite(
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
    console = console_beside(json)
    began = time.perf_counter()
    rules = TrainSettings(suite=suite).rules
    with LocalWorkers(WORKERS) as workers, RegularLines(console, workers.describe_progress):
        report = bench_suite(suite, rules, search, score, seed, workers, lambda line: print_line(console, line))
    _print_gap(console, report, time.perf_counter() - began)
    if json:
        print_json(asdict(report))


def _print_gap(console: Console, report: SuiteReport, seconds: float) -> None:
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


def measure_search(
    controller: str = ESPER,
    suite: str = "tokens",
    split: Literal["heldout", "transfer"] = "heldout",
    instances: int = 32,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Measure what one training under a controller is worth in trainings of a search over static networks.

    FLOPs are of training alone, for both: measuring is not charged.

    Args:
        controller: A baseline by its name, esper, or the directory of a run.
        suite: What is played: a name, or FILE.py:NAME of a file that registers it.
        split: Families trained on (heldout), or others (transfer).
        instances: On each of them 32 networks are drawn and trained.
        seed: Draws instances and networks.
        json: Print a machine-readable last line.
    """
    require_seed(seed)
    if instances < FEWEST_INSTANCES:
        raise ConfigError(f"{instances} instances give no interval: ask for at least {FEWEST_INSTANCES}")
    console = console_beside(json)
    own = get_suite(suite)
    print_line(
        console,
        f"{controller} plays {instances} instances of suite {own.name}; beside {POOL} static networks on each",
    )
    with LocalWorkers(WORKERS) as workers, RegularLines(console, workers.describe_progress):
        report = search_beside(controller, own, split, instances, seed, workers)
    console.print(_search_table(report))
    print_line(console, _describe_break_even(report))
    if json:
        print_json(asdict(report))


def _search_table(report: SearchReport) -> Table:
    table = Table("", *(f"{multiple}x" for multiple in BUDGETS), "B", "95% interval", box=None)
    for name, scores in report.scores.items():
        low, high = map(_multiple, report.B_interval[name])
        table.add_row(name, *(f"{one:.3f}" for one in scores.values()), _multiple(report.B[name]), f"{low} to {high}")
    return table


def _multiple(value: float | None) -> str:
    return f"> {BUDGETS[-1]}" if value is None else f"{value:.1f}"


def _describe_break_even(report: SearchReport) -> str:
    said = (
        f"{report.controller} scores {report.score:.3f} with one training; it has cost {report.trainings:.0f} of them"
    )
    if report.break_even is None:
        return f"{said}: a search does as well with one, so it never pays"
    return f"{said}: it has paid after {report.break_even:.0f} networks"


def measure_training(
    config: Path | None = None,
    iterations: int = ITERATIONS,
    overrides: Overrides = (),
    json: bool = False,
) -> None:
    """Measure how many environment steps a second one core trains on, and where the time goes.

    Args:
        config: YAML file with the settings of a training; the defaults where it says nothing.
        iterations: Measured one by one; one more is profiled.
        json: Print a machine-readable last line.
    """
    console = console_beside(json)
    chosen = ("shards=1", f"iterations={iterations}")
    settings = load_settings(TrainSettings, config, (*chosen, *overrides))
    if settings.devices != (CPU,):
        raise ConfigError(f"one core of the CPU is measured, not {', '.join(settings.devices)}: leave devices out")

    def show(number: int, speed: float) -> None:
        print_line(console, f"iteration {number} of {settings.iterations}: {speed:.0f} environment steps a second")

    benchmark = bench_train(settings, show)
    table = Table("part", "share of the time", box=None)
    for name, share in sorted(benchmark.share.items(), key=lambda part: -part[1]):
        table.add_row(name, f"{share:.1%}")
    console.print(table)
    print_line(
        console, f"{benchmark.env_steps_per_second:.0f} environment steps a second, the median; one process, one thread"
    )
    if json:
        print_json(asdict(benchmark))
