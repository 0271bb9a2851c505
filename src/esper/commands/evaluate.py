"""`esper evaluate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.commands.options import hint_if_stopped, progress_bar
from esper.experiments.comparison import compare_splits
from esper.experiments.evaluate import HELDOUT_INSTANCES, TRANSFER_INSTANCES, RunEvaluation, evaluate_run
from esper.experiments.evaluation import COHORT
from esper.experiments.workers import LOCAL, Backend, Computing
from esper.telemetry.run_directory import RunDirectory
from esper.ui.output import console_beside, print_json, say
from esper.ui.report.training import write_report
from esper.ui.standings import SPLIT_TITLES, describe_basis, did_it_help, evaluation_record, standings_table


def command(
    run: Annotated[Path, tyro.conf.Positional],
    instances: int = HELDOUT_INSTANCES,
    transfer: int = TRANSFER_INSTANCES,
    computing: Computing = LOCAL,
    json: bool = False,
) -> None:
    """Compare a run's policy with baselines on new instances.

    Args:
        run: Directory of the run.
        instances: Held-out instances, of the families trained on; every controller plays the same ones.
        transfer: Instances of families never trained on; 0 for none.
        json: Print a machine-readable last line; progress then goes to stderr.
    """
    console = console_beside(json)
    directory = RunDirectory.open_own(run)
    with directory.locked("esper evaluate"):
        found = _evaluate(directory, instances, transfer, computing, console)
    comparisons = compare_splits(found.results)
    report = write_report(directory)
    for split, comparison in comparisons.items():
        console.print(standings_table(comparison, f"{comparison.instances} {SPLIT_TITLES[split]}"))
        answer = did_it_help(comparison, split)
        say(console, f"Did learning help? {answer.short}. {answer.sentence}")
        say(console, f"{describe_basis(comparison)}\n")
    for line in (f"records: {directory.evaluation}", f"report: {report}", f"run: {directory.path}"):
        say(console, line)
    if json:
        iteration = found.behaviour.iteration
        print_json({"run": str(directory.path), "iteration": iteration, **evaluation_record(comparisons)})


def _evaluate(run: RunDirectory, instances: int, transfer: int, computing: Backend, console: Console) -> RunEvaluation:
    cohorts = math.ceil(max(instances, transfer) / COHORT)
    hint = hint_if_stopped(console, "what was played is kept: go on with the same command")
    with hint, computing.open(cohorts) as workers, progress_bar(console) as bar:
        shown = bar.add_task("loading the policy", total=None)

        def show(done: int, total: int, current: str) -> None:
            bar.update(shown, completed=done, total=total, description=current or "all controllers played")

        def tell(known: int, total: int) -> None:
            if known:
                say(bar.console, f"taken over from an earlier evaluation: {known} of {total} cohorts")

        return evaluate_run(run, workers, instances, transfer, show, tell)
