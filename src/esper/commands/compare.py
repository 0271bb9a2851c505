"""`esper compare`."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from esper.lab.experiment import Experiment, Trial, run_experiment
from rich.console import Console

from esper.commands.options import hint_if_stopped, progress_bar
from esper.config.loading import Overrides, load_settings
from esper.config.settings import compare_settings
from esper.dash.formats import score
from esper.dash.output import console_beside, print_differences, print_json, print_line
from esper.errors import ConfigError
from esper.lab.analysis import FEWEST_SEEDS
from esper.lab.arms import run_arms
from esper.lab.comparison import Comparison, compare_arms, compare_configurations
from esper.lab.report.training import report_configurations
from esper.lab.standings import record_comparison, show_comparison
from esper.train.iteration import Iteration
from esper.train.results import Arm
from esper.train.settings import TrainSettings
from esper.train.workers import LOCAL, Backend, Computing

INSTANCES = 256
COMPARISONS = Path("runs") / "comparisons"


def command(
    configs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    seeds: int = FEWEST_SEEDS,
    instances: int = INSTANCES,
    arms: bool = False,
    run_dir: Path | None = None,
    overrides: Overrides = (),
    computing: Computing = LOCAL,
    json: bool = False,
) -> None:
    """Train controllers by two or more configurations with several seeds each, and say which is better, if any.

    The first configuration is compared with each of the others.

    Args:
        configs: YAML files with settings, two or more (with --arms, one will do); their names name what is compared.
        seeds: Training seeds of each; fewer than 5 can show nothing.
        instances: Held-out instances that every policy plays.
        arms: Let the first configuration's policies play against all other arms, too: baselines, shuffled actions, the
            best fixed sequence found with the policy's own budget, and networks of fixed shape.
        run_dir: Directory for all runs; by default one under runs/comparisons/ named after the arms. Called again with
            the same one, a comparison goes on where it stopped.
        json: Print a machine-readable last line; progress then goes to stderr.
    """
    if seeds < 1 or instances < 2:
        raise ConfigError(f"{seeds} seeds on {instances} instances: ask for at least 1 seed and 2 instances")
    console = console_beside(json)
    if not configs:
        raise ConfigError("nothing to compare: give two or more YAML files with settings, or one and --arms")
    if len(configs) < 2 and not arms:
        raise ConfigError("one configuration cannot be compared: give two or more, or --arms")
    compared = _settings(configs, overrides)
    for name, settings in compared.items():
        print_differences(console, name, compare_settings(settings, TrainSettings()))
    folder = run_dir or COMPARISONS / "-".join(compared)
    experiment = Experiment(folder, compared, seeds, instances)
    with hint_if_stopped(console, f"go on with the same command and --run-dir {shlex.quote(str(folder))}"):
        trained = _run(experiment, computing, console)
        played = _play(experiment, computing, console) if arms else None
    configurations = compare_configurations(trained)
    show_comparison(console, configurations)
    for one in configurations.standings:
        print_line(console, f"{one.name}: score by seed {' '.join(map(score, one.by_seed))}")
    if played is not None:
        show_comparison(console, played)
    report = report_configurations(folder, configurations, played).write(folder)
    print_line(console, f"report: {report}")
    print_line(console, f"runs: {folder}")
    if json:
        print_json(_json(folder, configurations, played))


def _settings(configs: tuple[Path, ...], overrides: tuple[str, ...]) -> dict[str, TrainSettings]:
    """By configuration; files of one name are told apart by a number."""
    compared: dict[str, TrainSettings] = {}
    for config, count in Counter(one.resolve() for one in configs).items():
        if count > 1:
            raise ConfigError(f"{config} is given {count} times: give each configuration once")
    for config in configs:
        name, number = config.stem, 2
        while name in compared:
            name, number = f"{config.stem}-{number}", number + 1
        compared[name] = load_settings(TrainSettings, config, overrides)
    return compared


def _play(experiment: Experiment, computing: Backend, console: Console) -> Comparison:
    """The first configuration's policies and all other arms."""
    with progress_bar(console) as bar:
        shown = bar.add_task("loading the policies", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(shown, completed=done, total=total, description=what or "all arms played")

        return compare_arms(run_arms(experiment, show, computing))


def _run(experiment: Experiment, computing: Backend, console: Console) -> list[Arm]:
    iterations = {name: settings.iterations for name, settings in experiment.arms.items()}
    total = experiment.seeds * sum(iterations.values())
    with progress_bar(console) as bar:
        shown = bar.add_task("starting", total=total)
        trials = experiment.list_trials()

        def show(done: int, _trials: int, trial: Trial, iteration: Iteration | None) -> None:
            before = sum(iterations[one.arm] for one in trials[:done])
            now = 0 if iteration is None else iteration.number
            bar.update(shown, completed=before + now, description=f"{trial.arm}, seed {trial.seed}")

        trained = run_experiment(experiment, show, computing)
        bar.update(shown, completed=total, description="all trials done")
    return trained


def _json(folder: Path, configurations: Comparison, arms: Comparison | None) -> dict[str, Any]:
    judged = configurations if configurations.others or arms is None else arms
    words = [f"{one.name}: {one.verdict}" for one in judged.others]
    return {
        "run": str(folder),
        "verdict": "; ".join(words),
        "configurations": asdict(record_comparison(configurations)),
        "arms": arms and asdict(record_comparison(arms)),
    }
