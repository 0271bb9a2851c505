"""`esper evaluate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from esper.commands.options import hint_if_stopped, progress_bar, require_seed
from esper.dash.output import RegularLines, console_beside, print_json, print_line
from esper.errors import ConfigError
from esper.lab.comparison import compare_splits
from esper.lab.evaluate import (
    HELDOUT_INSTANCES,
    TRANSFER_INSTANCES,
    RunEvaluation,
    evaluate_by_name,
    evaluate_run,
)
from esper.lab.report.training import write_report
from esper.lab.standings import (
    SPLIT_TITLES,
    describe_basis,
    judge_learning,
    record_evaluation,
    record_scores,
    standings_table,
)
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split
from esper.train.evaluation import COHORT
from esper.train.workers import LOCAL, Backend, Computing


def command(
    run: Annotated[Path | None, tyro.conf.Positional] = None,
    controller: str | None = None,
    suite: str | None = None,
    split: Literal["heldout", "transfer"] | None = None,
    seed: int | None = None,
    instances: int = HELDOUT_INSTANCES,
    transfer: int | None = None,
    computing: Computing = LOCAL,
    json: bool = False,
) -> None:
    """Compare a run's policy, or any controller on any suite, with baselines on new instances.

    Args:
        run: Directory of the run, which keeps the results; or give a controller.
        controller: A baseline by its name, esper among them, or the directory of a run, of the suite or another one.
        suite: What the controller plays: a name, or FILE.py:NAME of a file that registers it.
        split: Families that the controller plays: those trained on (heldout, the default), or others (transfer).
        seed: Draws the controller's instances; by default 0.
        instances: Held-out instances of a run, or instances of the controller's; all play the same ones.
        transfer: Instances of a run's families never trained on; by default 64, 0 for none.
        json: Print a machine-readable last line; progress then goes to stderr.
    """
    console = console_beside(json)
    if run is None:
        _refuse_beside("--transfer goes with a run", transfer)
        _play(controller, suite, split or "heldout", seed or 0, instances, computing, console, json)
        return
    for option, value in (("--controller", controller), ("--suite", suite), ("--split", split), ("--seed", seed)):
        _refuse_beside(f"{option} does not go with a run, whose settings say so", value)
    _evaluate_run(run, instances, TRANSFER_INSTANCES if transfer is None else transfer, computing, console, json)


def _refuse_beside(why: str, value: object) -> None:
    """Raise ConfigError where an option is given that does not go with the others."""
    if value is not None:
        raise ConfigError(f"{why}: give a run, or --controller and --suite")


def _play(
    controller: str | None,
    suite: str | None,
    split: Split,
    seed: int,
    instances: int,
    computing: Backend,
    console: Console,
    json: bool,
) -> None:
    require_seed(seed)
    if controller is None or suite is None:
        raise ConfigError("nothing to evaluate: give the directory of a run, or --controller and --suite")
    own = get_suite(suite)
    print_line(console, f"{controller} and the baselines of suite {own.name} play {instances} instances each")
    if own.objective == "loss":
        print_line(console, "that suite is about the loss: read accuracy as the share of a guess's loss that is gone")
    with (
        computing.open_workers(math.ceil(instances / COHORT)) as workers,
        RegularLines(console, workers.describe_progress),
    ):
        comparison = evaluate_by_name(controller, own, split, instances, seed, workers)
    console.print(standings_table(comparison, f"{comparison.instances} {SPLIT_TITLES[split]} of suite {own.name}"))
    print_line(console, judge_learning(comparison, split).sentence)
    print_line(console, describe_basis(comparison))
    if json:
        print_json(record_scores(comparison))


def _evaluate_run(run: Path, instances: int, transfer: int, computing: Backend, console: Console, json: bool) -> None:
    directory = RunDirectory.open_training_run(run)
    with directory.locked("esper evaluate"):
        evaluation = _evaluate(directory, instances, transfer, computing, console)
    comparisons = compare_splits(evaluation.results)
    report = write_report(directory)
    for split, comparison in comparisons.items():
        console.print(standings_table(comparison, f"{comparison.instances} {SPLIT_TITLES[split]}"))
        answer = judge_learning(comparison, split)
        print_line(console, f"Did learning help? {answer.short}. {answer.sentence}")
        print_line(console, f"{describe_basis(comparison)}\n")
    for line in (f"records: {directory.evaluation}", f"report: {report}", f"run: {directory.path}"):
        print_line(console, line)
    if json:
        iteration = evaluation.behaviour.iteration
        print_json({"run": str(directory.path), "iteration": iteration, **record_evaluation(comparisons)})


def _evaluate(run: RunDirectory, instances: int, transfer: int, computing: Backend, console: Console) -> RunEvaluation:
    cohorts = math.ceil(max(instances, transfer) / COHORT)
    hint = hint_if_stopped(console, "what was played is kept: go on with the same command")
    with hint, computing.open_workers(cohorts) as workers, progress_bar(console) as bar:
        shown = bar.add_task("loading the policy", total=None)

        def show(done: int, total: int, current: str) -> None:
            bar.update(shown, completed=done, total=total, description=current or "all controllers played")

        def show_progress(known: int, total: int) -> None:
            if known:
                print_line(bar.console, f"taken over from an earlier evaluation: {known} of {total} cohorts")

        return evaluate_run(run, workers, instances, transfer, show, show_progress)
