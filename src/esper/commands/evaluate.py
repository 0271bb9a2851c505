"""`esper evaluate` and `esper report`."""

import math
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from esper.commands.options import Instances, Seed, hint_if_stopped, report_work
from esper.control.rules import LookRule
from esper.dash.output import console_beside, print_json, print_line, report_progress
from esper.errors import ConfigError, RunError, plural
from esper.files import lock_folder
from esper.lab.analysis import compare_splits
from esper.lab.drawing import export_exhibits
from esper.lab.evaluate import HELDOUT_INSTANCES, TRANSFER_INSTANCES, PlaySettings, evaluate_by_name, evaluate_run
from esper.lab.exhibit import Drawing, Exhibit, Table
from esper.lab.report import report_on, write_report
from esper.lab.standings import (
    assess_learning,
    describe_basis,
    name_instances,
    record_evaluation,
    show_comparison,
    standings_table,
)
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import get_suite
from esper.train.evaluation import COHORT
from esper.train.workers import LOCAL, Computing


def command(
    run: Annotated[Path | None, tyro.conf.Positional] = None,
    controller: str | None = None,
    suite: str | None = None,
    split: Literal["heldout", "transfer"] | None = None,
    seed: Seed | None = None,
    instances: Instances = HELDOUT_INSTANCES,
    transfer: Instances | None = None,
    run_dir: Path | None = None,
    computing: Computing = LOCAL,
    json: bool = False,
) -> None:
    """Compare a run's policy, or any controller on any suite, with baselines on new instances.

    Args:
        run: Directory of the run to evaluate; results are stored there. Without a run, give --suite.
        controller: With --suite: name of a baseline (default: look), directory of a run (of any suite), or
            FILE.py:NAME of your own class or function that takes the number of decisions and returns a controller.
        suite: Name of the suite to play, or FILE.py:NAME of a file that registers it.
        split: With --suite: play the families trained on (heldout, the default) or unseen families (transfer).
        seed: With --suite: random seed of the instances (default: 0).
        instances: Number of held-out instances. All controllers play the same ones.
        transfer: With a run: instances of families never trained on (default: 64; 0: none).
        run_dir: With --suite: new directory for a run that records the controller's episodes, for the dashboard and a
            report (default: nothing is kept).
        json: Print a final line of JSON to stdout, and progress to stderr.
    """
    console = console_beside(json)

    if run is None and transfer is not None:
        raise ConfigError("--transfer needs a run: give a run, or --suite")
    alone = {"--controller": controller, "--suite": suite, "--split": split, "--seed": seed, "--run-dir": run_dir}
    for name, value in alone.items():
        if run is not None and value is not None:
            raise ConfigError(f"{name} cannot be combined with a run, whose settings have it: give a run, or --suite")

    # A controller on a suite: without a directory, nothing is kept.
    if run is None:
        if suite is None:
            raise ConfigError("nothing to evaluate: give the directory of a run, or --suite")
        families, controller, played = split or "heldout", controller or LookRule.name, get_suite(suite)
        print_line(
            console, f"{controller} and the baselines of suite {played.name} play {plural(instances, 'instance')} each"
        )
        if played.objective == "loss":
            meaning = "the relative reduction of the loss below that of guessing"
            print_line(console, f"this suite is scored by loss: accuracy means {meaning}")
        play = PlaySettings(controller=controller, suite=suite, split=families, instances=instances, seed=seed or 0)
        pool = computing.open_workers(math.ceil(instances / COHORT))
        recorded = None if run_dir is None else RunDirectory.create(run_dir)
        locked = nullcontext() if recorded is None else recorded.locked("esper evaluate")
        with locked, report_work(console, "playing, in cohorts", pool) as workers:
            comparison = evaluate_by_name(play, workers, recorded)
        named = name_instances(comparison.instances, families)
        console.print(standings_table(comparison, f"{named} of suite {played.name}"))
        print_line(console, assess_learning(comparison, families).sentence)
        print_line(console, describe_basis(comparison))
        if recorded is not None:
            print_line(console, f"report: {write_report(recorded)}")
            print_line(console, f"run: {recorded.path}")
        if json:
            scores = {arm.name: (arm.score, arm.score_interval) for arm in comparison.standings}
            print_json({name: {"score": mean, "score_interval": ends} for name, (mean, ends) in scores.items()})
        return

    # A run: its directory keeps the results, and its report shows them.
    directory = RunDirectory.open_training_run(run)
    with directory.locked("esper evaluate"):
        most_transfer = TRANSFER_INSTANCES if transfer is None else transfer

        def show_cached(done: int, total: int) -> None:
            if done:
                print_line(console, f"reused from an earlier evaluation: {done} of {plural(total, 'cohort')}")

        with (
            hint_if_stopped(console, "finished cohorts are kept: run the same command again to continue"),
            computing.open_workers(math.ceil(max(instances, most_transfer) / COHORT)) as workers,
            report_progress(console, "loading the policy") as progress,
        ):
            results, behaviour = evaluate_run(
                directory, workers, instances, most_transfer, progress.update, show_cached
            )
    comparisons = compare_splits(results)
    page = write_report(directory)
    for part, comparison in comparisons.items():
        console.print(standings_table(comparison, name_instances(comparison.instances, part)))
        print_line(console, f"{describe_basis(comparison)}\n")
    for line in (f"records: {directory.evaluation}", f"report: {page}", f"run: {directory.path}"):
        print_line(console, line)
    # The answer comes last, where it is still seen when the tables have gone by.
    print_line(console, "\nDid learning help?")
    for part in reversed(comparisons):
        verdict = assess_learning(comparisons[part], part)
        print_line(console, f"{verdict.short}. {verdict.sentence}")
    if json:
        about = {"run": str(directory.path), "iteration": behaviour.iteration}
        print_json(about | record_evaluation(comparisons))


def report(
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path | None = None, bare: Path | None = None
) -> None:
    """Write the report of a training run, a grown model or a comparison. The run may still be in progress.

    Evaluated runs that differ only in their random seed share one report.

    Args:
        paths: Directory of a run or a comparison; the report is written to its report.html. Several runs need --out.
        out: Write the report to this folder instead, with all figures (PDF, PNG, SVG) and tables (CSV). Each states
            the query or files its numbers come from.
        bare: For a grown model: run of the same training loop with the controller "none", to compare with.
    """
    # One run or comparison keeps its own report; several need a folder for theirs.
    if not paths or (len(paths) > 1 and out is None):
        raise ConfigError("give the directory of one run or comparison, or several runs and --out FOLDER")
    folder = out or next(iter(paths))
    console = Console()
    with ExitStack() as locks:
        # The report is built before its folder, so that a mistake in the paths leaves nothing behind.
        with report_progress(console, "reading and drawing"):
            if os.path.isdir(folder):  # unlike Path.is_dir, it takes names that no file can have
                locks.enter_context(lock_folder(folder))  # what is read here must not change before it is written
            content = report_on(paths, bare)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {folder} ({error.strerror}): choose another place") from error
        # The page, its figures and its tables are of one report, also if another is written here at the same time.
        locks.enter_context(lock_folder(folder))
        page = content.write(folder)
        written: list[Exhibit] = []
        if out is not None:
            with report_progress(console, "writing figures and tables") as progress:
                written = export_exhibits(out, content.exhibits, progress.update)
    for title, comparison in content.comparisons.items():
        show_comparison(console, comparison, title)
    print_line(console, f"report: {page}")
    if out is not None:
        for exhibit in content.exhibits:
            if not exhibit.rows:
                print_line(console, f"left out {exhibit.name}: {exhibit.absent}")
        figures = sum(isinstance(exhibit, Drawing) for exhibit in written)
        print_line(console, f"{plural(figures, 'figure')}: {out / Drawing.folder}")
        print_line(console, f"{plural(len(written) - figures, 'table')}: {out / Table.folder}")
