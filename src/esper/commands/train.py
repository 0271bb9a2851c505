"""`esper train`."""

import os
import shlex
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from esper.commands.options import RUNS, Overrides, Seed, hint_if_stopped
from esper.config.loading import compare_settings, load_settings
from esper.dash.formats import duration, score
from esper.dash.output import console_beside, print_differences, print_json, print_line
from esper.dash.progress import TrainingProgress, draw_learning_curve
from esper.errors import ConfigError, did_you_mean, plural
from esper.lab.report import write_report
from esper.runs.loggers import Tool, open_loggers, require_logger
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.train.iteration import LEVELS, Iteration
from esper.train.settings import PRESETS, TrainSettings
from esper.train.trainer import Trainer, extend_run, train_controller
from esper.train.workers import LOCAL, Computing


def find_preset(name: str) -> Path:
    """The file of a preset."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f": choose from {', '.join(PRESETS)}"
        raise ConfigError(f"no preset {name!r}{hint}")
    return PRESETS[name]


_MEANINGS = "; ".join(
    f"{name}: {path.read_text().splitlines()[0].removeprefix('# ')}" for name, path in PRESETS.items()
)
Preset = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="|".join(PRESETS), help=f"Settings for one purpose, which --set refines. {_MEANINGS}.".replace("`", "")
    ),
]


def command(
    preset: Preset = None,
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
        config: YAML file with settings, instead of a preset. Settings it omits keep their defaults.
        run_dir: New or empty directory for the run (default: runs/DATE-TIME).
        seed: Short for --set seed=N.
        start: Start from the policy of the run in this directory; short for --set start_from=RUN.
        resume: Directory of a run to continue from its newest checkpoint, with its own settings. With --set
            iterations=N, also a finished run is trained on; schedules then follow the new number.
        logger: Send all metrics live to this tool; repeatable. Configure the tool by its own environment variables.
            TensorBoard files are in RUN/loggers/tensorboard.
        json: Print a final line of JSON to stdout, and progress to stderr.
    """
    console = console_beside(json)
    for tool in logger:
        require_logger(tool)
    if preset is not None and config is not None:
        raise ConfigError("--preset and --config are both files of settings: give one, and refine it with --set")
    if resume is None:
        shortcuts = {"seed": seed, "start_from": start}
        overrides = (*overrides, *(f"{key}={value}" for key, value in shortcuts.items() if value is not None))
        file = config if preset is None else find_preset(preset)
        settings = load_settings(TrainSettings, file, overrides)
        print_differences(console, "settings", compare_settings(settings, TrainSettings()))
        run = RunDirectory(run_dir or RUNS / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"))
        if os.path.isdir(run.path):
            RunDirectory.create(run.path)  # refuses one that is not empty: `train_controller` would go on with a run
    elif preset or config or run_dir or seed is not None or start is not None:
        raise ConfigError("--resume uses the run's own settings and directory: remove the other options")
    else:
        run = RunDirectory.open_training_run(resume)
        if overrides:
            extend_run(run, overrides)
        settings = load_settings(TrainSettings, run.config)

    @contextmanager
    def watch(trainer: Trainer) -> Generator[Callable[[Iteration], None]]:
        if trainer.done >= settings.iterations:
            print_line(console, "the run is already complete")
            yield lambda _: None
            return
        store = trainer.store
        progress = TrainingProgress(console, settings.iterations, [value for _, value in store.series("objective")])
        if trainer.done:
            print_line(console, f"resuming after iteration {trainer.done} of {settings.iterations}")
        name, values = run.path.absolute().name, settings.model_dump(mode="json")
        with open_loggers(logger, run.loggers, name, values) as log_iteration, progress:
            with workers.report_to(progress.count_baseline_tasks):
                levels = trainer.measure_baseline_levels()
            progress.add_levels(levels, store.series("probe_score"))
            if settings.environments == settings.ppo.group:
                print_line(
                    console,
                    "an iteration is one new instance (environments = ppo.group), so its J is not comparable with the "
                    "baselines, which played others; the greedy policy plays the same as they do",
                )

            def report(iteration: Iteration) -> None:
                progress.add(iteration)
                log_iteration(store, iteration.number)

            yield report

    with (
        hint_if_stopped(console, f"resume with: {run.command} --resume {shlex.quote(str(run.path))}"),
        computing.open_workers(settings.shards) as workers,
    ):
        summary = train_controller(settings, run.path, workers=workers, watch=watch)
    report = write_report(run)

    speed = summary.environment_steps_per_second
    took = f"{plural(summary.iterations, 'iteration')} in {duration(summary.seconds)}"
    print_line(console, f"{took}, {speed:.0f} environment steps per second")
    if summary.probe_score is not None and summary.baselines:
        with RunReader.open(run.store) as reader:
            probes, levels = reader.series("probe_score"), reader.metadata()[LEVELS]
        console.print(draw_learning_curve(probes, levels, settings.probe_instances, console.width))
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        untrained = "" if summary.untrained is None else f", untrained {score(summary.untrained)}"
        level = score(summary.baselines[best])
        print_line(console, f"greedy policy {score(summary.probe_score)}{untrained}, best baseline ({best}) {level}")
    print_line(console, f"report: {report}")
    print_line(console, f"compare it on new instances with: esper evaluate {shlex.quote(str(run.path))}")
    print_line(console, f"run: {run.path}")
    if json:
        print_json({"run": str(run.path), **asdict(summary), "environment_steps_per_second": speed})
