"""`esper evaluate`."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from esper.commands.compute import Computing
from esper.experiments.backend import LOCAL, Backend
from esper.experiments.comparison import Comparison, compare
from esper.experiments.evaluate import HELDOUT_INSTANCES, SPLITS, TRANSFER_INSTANCES, Evaluation, evaluate
from esper.experiments.play import COHORT
from esper.experiments.results import of_split
from esper.experiments.run_directory import RunDirectory
from esper.signals import Terminated
from esper.ui.output import console_beside, print_json, say
from esper.ui.report import write_report
from esper.ui.tables import comparison_table
from esper.ui.verdict import answer

_TITLES = {"heldout": "held-out instances", "transfer": "transfer: families never trained on"}
_PLACES = {"heldout": "held-out", "transfer": "transfer"}


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
    directory = RunDirectory.open(run)
    with directory.locked("esper evaluate"):
        found = _evaluate(directory, instances, transfer, computing, console)
    comparisons = {split: compare(results) for split in SPLITS if (results := of_split(found.results, split))}
    report = write_report(directory)
    for split, comparison in comparisons.items():
        console.print(comparison_table(comparison, f"{comparison.instances} {_TITLES[split]}"))
        reply = answer(comparison, _PLACES[split])
        say(console, f"Did learning help? {reply.short}. {reply.sentence}\n")
    for line in (f"records: {directory.evaluation}", f"report: {report}", f"run: {directory.path}"):
        say(console, line)
    if json:
        print_json(_json(directory, found, comparisons))


def _evaluate(run: RunDirectory, instances: int, transfer: int, computing: Backend, console: Console) -> Evaluation:
    cohorts = math.ceil(max(instances, transfer) / COHORT)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with computing.open(cohorts) as workers, bar:
        shown = bar.add_task("loading the policy", total=None)

        def show(done: int, total: int, current: str) -> None:
            bar.update(shown, completed=done, total=total, description=current or "all controllers played")

        def tell(known: int, total: int) -> None:
            if known:
                say(bar.console, f"taken over from an earlier evaluation: {known} of {total} cohorts")

        try:
            return evaluate(run, workers, instances, transfer, show, tell)
        except (KeyboardInterrupt, Terminated):
            say(bar.console, "what was played is kept: go on with the same command")
            raise


def _json(run: RunDirectory, found: Evaluation, comparisons: dict[Any, Comparison]) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "iteration": found.behaviour.iteration,
        **{
            split: {
                "instances": comparison.instances,
                "answer": answer(comparison, _PLACES[split]).short,
                "controllers": [asdict(standing) for standing in comparison.standings],
            }
            for split, comparison in comparisons.items()
        },
    }
