"""`esper train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from esper.commands.options import hold_run
from esper.config.loading import Overrides, load_settings
from esper.config.settings import compare_settings
from esper.dash.formats import duration, score
from esper.dash.output import console_beside, print_differences, print_json, print_line
from esper.dash.progress import TrainingProgress, view_training
from esper.errors import ConfigError
from esper.lab.report.training import write_report
from esper.numerics.devices import require_device
from esper.runs.loggers import Tool, open_loggers, require_logger
from esper.runs.run_directory import RunDirectory
from esper.train.collect import check_start_policy
from esper.train.iteration import Iteration, TrainingSummary, summarise_run
from esper.train.settings import TrainSettings
from esper.train.trainer import Trainer
from esper.train.workers import LOCAL, Backend, Computing


def command(
    config: Path | None = None,
    run_dir: Path | None = None,
    seed: int | None = None,
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    resume: Path | None = None,
    overrides: Overrides = (),
    computing: Computing = LOCAL,
    logger: Annotated[tuple[Tool, ...], tyro.conf.UseAppendAction] = (),
    json: bool = False,
) -> None:
    """Learn a growth controller, or go on with a run.

    Args:
        config: YAML file with settings; the defaults where it says nothing.
        run_dir: Directory for the run, new or empty; by default one under runs/ named by the time.
        seed: Short for --set seed=N.
        start: Short for --set start_from=NAME: learn on from the policy that comes with Esper (esper) or of a run.
        resume: Directory of a run to go on with, from its newest checkpoint and with its own settings.
        logger: Send all figures live to this tool, which its own environment variables configure; may be given many
            times. TensorBoard reads RUN/loggers/tensorboard.
        json: Print a machine-readable last line; progress then goes to stderr.
    """
    console = console_beside(json)
    for tool in logger:
        require_logger(tool)
    if resume is None:
        short = {"seed": seed, "start_from": start}
        assignments = (*overrides, *(f"{key}={value}" for key, value in short.items() if value is not None))
        settings = load_settings(TrainSettings, config, assignments)
        print_differences(console, "settings", compare_settings(settings, TrainSettings()))
        check_start_policy(settings)
        require_device(settings.devices[0])  # before there is a directory: the policy learns there, in this process
    elif config or run_dir or seed is not None or start is not None or overrides:
        raise ConfigError("--resume goes on with the run's own settings and directory: give no others beside it")
    else:
        settings = load_settings(TrainSettings, RunDirectory.open_training_run(resume).config)
    with hold_run(resume, run_dir, settings, console) as run:
        summary = _train(run, settings, computing, logger, console)
    report = write_report(run)
    _conclude(console, run, summary, report)
    if json:
        print_json(_json(run, summary))


def _train(
    run: RunDirectory, settings: TrainSettings, computing: Backend, tools: Sequence[Tool], console: Console
) -> TrainingSummary:
    """Do what remains of the run."""
    with run.open_store() as store, computing.open_workers(settings.shards) as workers:
        trainer = Trainer.open(run, settings, store, workers)
        past = [value for _, value in store.series("objective")]
        progress = TrainingProgress(settings.iterations, past)
        if trainer.done < settings.iterations:
            if trainer.done:
                print_line(console, f"going on after iteration {trainer.done} of {settings.iterations}")
            configuration = settings.model_dump(mode="json")
            with (
                open_loggers(tools, run.loggers, run.path.absolute().name, configuration) as log_iteration,
                view_training(console, progress) as view,
            ):
                view.show_baselines(trainer.measure_baseline_levels())

                def report(iteration: Iteration) -> None:
                    view.add_iteration(iteration)
                    log_iteration(store, iteration.number)

                trainer.train(report)
        else:
            print_line(console, "the run is complete already")
        return summarise_run(store)


def _conclude(console: Console, run: RunDirectory, summary: TrainingSummary, report: Path) -> None:
    print_line(
        console,
        f"{summary.iterations} iterations in {duration(summary.seconds)}, "
        f"{summary.environment_steps_per_second:.0f} environment steps a second",
    )
    if summary.probe_score is not None and summary.baselines:
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        level = score(summary.baselines[best])
        print_line(console, f"greedy policy {score(summary.probe_score)}, best baseline there {best} {level}")
    print_line(console, f"report: {report}")
    print_line(console, f"compare it on new instances with: esper evaluate {shlex.quote(str(run.path))}")
    print_line(console, f"run: {run.path}")


def _json(run: RunDirectory, summary: TrainingSummary) -> dict[str, Any]:
    return {
        "run": str(run.path),
        **asdict(summary),
        "environment_steps_per_second": summary.environment_steps_per_second,
    }
