"""`esper bench suite` and `esper bench search`."""

import time
from dataclasses import asdict
from typing import Annotated, Literal

import tyro
from annotated_types import Interval
from rich.table import Table

from esper.commands.options import Instances, Seed, report_work
from esper.control.rules import LookRule
from esper.dash.output import console_beside, print_json, print_line
from esper.errors import ConfigError, plural
from esper.lab.bench_suite import MOST_PLANTINGS, bench_suite
from esper.lab.evaluate import FEWEST_INSTANCES
from esper.lab.search import BUDGETS, POOL, search_beside
from esper.tasks.registry import get_suite
from esper.train.settings import TrainSettings
from esper.train.workers import LocalWorkers

WORKERS = 2


def measure_suite(
    suite: Annotated[str, tyro.conf.Positional] = "tokens",
    search: Instances = 6,
    score: Instances = 16,
    plantings: Annotated[int, Interval(ge=1, le=MOST_PLANTINGS)] = MOST_PLANTINGS,
    seed: Seed = 0,
    json: bool = False,
) -> None:
    """Measure how much control a suite rewards: its context-oracle gap, with the best fixed schedules.

    Args:
        suite: Name of the suite, or FILE.py:NAME of a file that registers it.
        search: Instances per variant for choosing the best schedules.
        score: Fresh instances per variant for scoring the chosen schedules.
        plantings: Maximum number of seeds per schedule. Lower is much faster.
        seed: Random seed of the instances.
        json: Print a final line of JSON.
    """
    console = console_beside(json)
    start = time.perf_counter()
    rules = TrainSettings(suite=suite).rules
    with report_work(console, "playing schedules, in cohorts", LocalWorkers(WORKERS)) as workers:
        report = bench_suite(
            suite, rules, search, score, plantings, seed, workers, lambda line: print_line(console, line)
        )
    seconds = time.perf_counter() - start
    for title, choices in (("family", report.families), ("variant", report.variants)):
        columns = (title, "best schedule", "score", f"overall best ({report.overall})", "nothing")
        table = Table(*columns, title=f"best fixed schedule per {title}")
        for choice in choices:
            numbers = (choice.score, choice.score_of_overall, choice.score_of_nothing)
            table.add_row(choice.context, choice.schedule, *(f"{number:.3f}" for number in numbers))
        console.print(table)
    console.print(
        f"nothing {report.nothing_score:.3f}; best fixed schedule overall {report.overall_score:.3f}\n"
        f"context-oracle gap by family {report.context_oracle_gap:.3f} (standard error {report.standard_error:.3f}), "
        f"by variant {report.variant_gap:.3f} ({report.variant_standard_error:.3f}); "
        f"{plural(report.schedules, 'schedule')}, {plural(report.episodes, 'episode')}, {seconds:.0f} s"
    )
    if json:
        print_json(asdict(report))


def measure_search(
    controller: str = LookRule.name,
    suite: str = "tokens",
    split: Literal["heldout", "transfer"] = "heldout",
    instances: Instances = 32,
    seed: Seed = 0,
    json: bool = False,
) -> None:
    """Measure how many trainings of static networks a search needs to match one training under a controller.

    FLOPs are those of training only, without measurements.

    Args:
        controller: Name of a baseline, directory of a run, or FILE.py:NAME of your own class or function.
        suite: Name of the suite, or FILE.py:NAME of a file that registers it.
        split: Families trained on (heldout) or unseen families (transfer).
        instances: Number of instances. On each, 32 static networks are drawn and trained.
        seed: Random seed of instances and networks.
        json: Print a final line of JSON.
    """
    if instances < FEWEST_INSTANCES:
        raise ConfigError(f"{plural(instances, 'instance')} cannot give an interval: give at least {FEWEST_INSTANCES}")
    console, played = console_beside(json), get_suite(suite)
    what = f"{controller} plays {plural(instances, 'instance')} of suite {played.name}"
    print_line(console, f"{what}, each with {POOL} static networks")
    with report_work(console, "training networks, in cohorts", LocalWorkers(WORKERS)) as workers:
        report = search_beside(controller, played, split, instances, seed, workers)

    def format_multiple(value: float | None) -> str:
        return f"> {BUDGETS[-1]}" if value is None else f"{value:.1f}"

    table = Table("", *(f"{multiple}x" for multiple in BUDGETS), "B", "95% interval", box=None)
    for name, scores in report.scores.items():
        low, high = map(format_multiple, report.B_interval[name])
        cells = (f"{score:.3f}" for score in scores.values())
        table.add_row(name, *cells, format_multiple(report.B[name]), f"{low} to {high}")
    console.print(table)
    result = f"{report.controller} scores {report.score:.3f} with one training."
    if report.trainings:
        result += f" Learning or tuning it took {plural(round(report.trainings), 'training')}."
        if report.break_even is None:
            result += " A search scores as much with one training, so this never pays off."
        else:
            result += f" This pays off from {plural(report.break_even, 'network')} on."
    print_line(console, result)
    if json:
        print_json(asdict(report))
