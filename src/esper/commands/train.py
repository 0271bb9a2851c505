"""`esper train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.commands.options import Overrides, Seed, hold_run
from esper.config.loading import compare_settings, load_settings
from esper.dash.formats import duration, score
from esper.dash.output import console_beside, print_differences, print_json, print_line
from esper.dash.progress import TrainingProgress, view_training
from esper.errors import ConfigError, plural
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
    seed: Seed | None = None,
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    resume: Path | None = None,
    overrides: Overrides = (),
    computing: Computing = LOCAL,
    logger: Annotated[tuple[Tool, ...], tyro.conf.UseAppendAction] = (),
    json: bool = False,
) -> None:
    """Train a growth controller, or resume a run.

    Args:
        config: YAML file with settings. Settings it omits keep their defaults.
        run_dir: New or empty directory for the run (default: runs/DATE-TIME).
        seed: Short for --set seed=N.
        start: Start from the policy of the run in this directory; short for --set start_from=RUN.
        resume: Directory of a run to continue from its newest checkpoint, with its own settings.
        logger: Send all metrics live to this tool; repeatable. Configure the tool by its own environment variables.
            TensorBoard files are in RUN/loggers/tensorboard.
        json: Print a final line of JSON to stdout, and progress to stderr.
    """
    # Everything that can be refused is refused before there is a directory.
    console = console_beside(json)
    for tool in logger:
        require_logger(tool)
    if resume is None:
        shortcuts = {"seed": seed, "start_from": start}
        overrides = (*overrides, *(f"{key}={value}" for key, value in shortcuts.items() if value is not None))
        settings = load_settings(TrainSettings, config, overrides)
        print_differences(console, "settings", compare_settings(settings, TrainSettings()))
        check_start_policy(settings)
        require_device(settings.devices[0])  # where the policy learns, in this process
    elif config or run_dir or seed is not None or start is not None or overrides:
        raise ConfigError("--resume uses the run's own settings and directory: remove the other options")
    else:
        settings = load_settings(TrainSettings, RunDirectory.open_training_run(resume).config)

    with hold_run(resume, run_dir, settings, console) as run:
        summary = _train(run, settings, computing, logger, console)
    report = write_report(run)

    print_line(
        console,
        f"{plural(summary.iterations, 'iteration')} in {duration(summary.seconds)}, "
        f"{summary.environment_steps_per_second:.0f} environment steps per second",
    )
    if summary.probe_score is not None and summary.baselines:
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        level = score(summary.baselines[best])
        print_line(console, f"greedy policy {score(summary.probe_score)}, best baseline ({best}) {level}")
    print_line(console, f"report: {report}")
    print_line(console, f"compare it on new instances with: esper evaluate {shlex.quote(str(run.path))}")
    print_line(console, f"run: {run.path}")
    if json:
        speed = summary.environment_steps_per_second
        print_json({"run": str(run.path), **asdict(summary), "environment_steps_per_second": speed})


def _train(
    run: RunDirectory, settings: TrainSettings, computing: Backend, tools: Sequence[Tool], console: Console
) -> TrainingSummary:
    """Train for the iterations that the run still lacks."""
    with run.open_store() as store, computing.open_workers(settings.shards) as workers:
        trainer = Trainer.open(run, settings, store, workers)
        if trainer.done >= settings.iterations:
            print_line(console, "the run is already complete")
            trainer.train(lambda _: None)  # marks it as finished
            return summarise_run(store)
        progress = TrainingProgress(settings.iterations, [value for _, value in store.series("objective")])
        if trainer.done:
            print_line(console, f"resuming after iteration {trainer.done} of {settings.iterations}")
        name, values = run.path.absolute().name, settings.model_dump(mode="json")
        with (
            open_loggers(tools, run.loggers, name, values) as log_iteration,
            view_training(console, progress) as view,
        ):
            with workers.report_to(view.count_baseline_tasks):
                levels = trainer.measure_baseline_levels()
            view.show_baselines(levels)

            def report(iteration: Iteration) -> None:
                view.add_iteration(iteration)
                log_iteration(store, iteration.number)

            trainer.train(report)
        return summarise_run(store)
