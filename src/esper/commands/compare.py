"""`esper compare`."""

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Interval

from esper.commands.options import Instances, Overrides, hint_if_stopped
from esper.config.loading import compare_settings, load_settings
from esper.dash.formats import score
from esper.dash.output import console_beside, print_differences, print_json, print_line, report_progress
from esper.errors import ConfigError, plural
from esper.lab.analysis import FEWEST_SEEDS, compare_arms, compare_configurations
from esper.lab.experiment import Experiment, Training, load_own_controllers, run_arms, run_experiment
from esper.lab.report import report_configurations
from esper.lab.standings import record_comparison, show_comparison
from esper.train.iteration import Iteration
from esper.train.settings import TrainSettings
from esper.train.workers import LOCAL, Computing

INSTANCES = 256
MOST_SEEDS = 10_000
COMPARISONS = Path("runs") / "comparisons"


def command(
    configs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    seeds: Annotated[int, Interval(ge=0, le=MOST_SEEDS)] = FEWEST_SEEDS,
    instances: Instances = INSTANCES,
    arms: bool = False,
    controllers: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="controller")] = (),
    run_dir: Path | None = None,
    overrides: Overrides = (),
    computing: Computing = LOCAL,
    json: bool = False,
) -> None:
    """Train two or more configurations with several random seeds each, and test which is better.

    The first configuration is compared with each of the others.

    Args:
        configs: Two or more YAML files with settings; one is enough with --arms. File names become names of arms.
        seeds: Random seeds per configuration. Fewer than 5 cannot show a difference.
        instances: Held-out instances that every policy plays.
        arms: Also compare the first configuration with baselines, its shuffled actions, the best fixed sequence found
            with the policy's budget, and networks of fixed shape.
        controllers: With --arms: also compare the controller FILE.py:NAME, your own class or function. Repeatable.
        run_dir: Directory for all runs (default: runs/comparisons/ARMS). With the directory of an interrupted
            comparison, it continues.
        json: Print a final line of JSON to stdout, and progress to stderr.
    """
    console = console_beside(json)
    if seeds < 1 or instances < 2:
        given = f"{plural(seeds, 'seed')} on {plural(instances, 'instance')}"
        raise ConfigError(f"{given}: give at least 1 seed and 2 instances")
    if len(configs) < (1 if arms else 2):
        raise ConfigError("nothing to compare: give two or more YAML files with settings, or one and --arms")
    if controllers and not arms:
        raise ConfigError("--controller needs --arms")
    for config, count in Counter(config.resolve() for config in configs).items():
        if count > 1:
            raise ConfigError(f"{config} is given {plural(count, 'time')}: give each configuration once")
    # A number is added to the names of files that have the same name.
    compared: dict[str, TrainSettings] = {}
    for config in configs:
        name, number = config.stem, 2
        while name in compared:
            name, number = f"{config.stem}-{number}", number + 1
        compared[name] = load_settings(TrainSettings, config, overrides)
        print_differences(console, name, compare_settings(compared[name], TrainSettings()))

    # Train every configuration with every random seed; trainings that are done already are kept.
    folder = run_dir or COMPARISONS / "-".join(compared)
    experiment = Experiment(folder, compared, seeds, instances)
    own = load_own_controllers(experiment, controllers)
    with hint_if_stopped(console, f"to continue, add --run-dir {shlex.quote(str(folder))} to the same command"):
        with report_progress(console, "starting", len(experiment.list_trainings())) as progress:

            def show_training(done: int, _total: int, training: Training, iteration: Iteration | None) -> None:
                if iteration is None:
                    progress.skip_to(done)  # of trainings that were done before, nothing was trained now
                part = iteration.number / iteration.total if iteration else 0
                progress.update(done + part, name=f"{training.arm}, seed {training.seed}, in trainings")

            trained = run_experiment(experiment, show_training, computing)
        played = None
        if arms:
            with report_progress(console, "loading the policies") as progress:

                def show(done: int, total: int, current: str) -> None:
                    progress.update(done, total, f"{current or 'all arms played'}, in environment steps")

                played = compare_arms(run_arms(experiment, show, computing, own))

    configurations = compare_configurations(trained)
    show_comparison(console, configurations)
    for standing in configurations.standings:
        print_line(console, f"{standing.name}: score by seed {' '.join(map(score, standing.by_seed))}")
    if played is not None:
        show_comparison(console, played)
    print_line(console, f"report: {report_configurations(folder, configurations, played).write(folder)}")
    print_line(console, f"runs: {folder}")
    if json:
        shown = configurations if configurations.others or played is None else played
        verdicts = [f"{standing.name}: {standing.verdict}" for standing in shown.others]
        print_json(
            {
                "run": str(folder),
                "verdict": "; ".join(verdicts),
                "configurations": asdict(record_comparison(configurations)),
                "arms": played and asdict(record_comparison(played)),
            }
        )
