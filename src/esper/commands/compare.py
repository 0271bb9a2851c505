"""`esper compare`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper.config import Overrides, load_settings
from esper.errors import ConfigError
from esper.experiments.compare.judgement import Pair, judge
from esper.experiments.compare.trials import Contest, Trial, run_contest
from esper.experiments.iteration import Iteration
from esper.experiments.settings import TrainSettings
from esper.experiments.statistics import Floats
from esper.signals import Terminated
from esper.ui.output import console_beside, print_json, say

SEEDS = 5
INSTANCES = 256
COMPARISONS = Path("runs") / "comparisons"


def command(
    configs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    seeds: int = SEEDS,
    instances: int = INSTANCES,
    run_dir: Path | None = None,
    overrides: Overrides = (),
    json: bool = False,
) -> None:
    """Train controllers by two or more configurations with several seeds each, and say which is better, if any.

    Args:
        configs: YAML files with settings, two or more; their names name the arms.
        seeds: Training seeds of each arm; fewer than 4 can show nothing.
        instances: Held-out instances that every policy plays.
        run_dir: Directory for all runs; by default one under runs/comparisons/ named after the arms. Called again with
            the same one, a comparison goes on where it stopped.
        json: Print a machine-readable last line; progress then goes to stderr.
    """
    if seeds < 1 or instances < 2:
        raise ConfigError(f"{seeds} seeds on {instances} instances: ask for at least 1 seed and 2 instances")
    console = console_beside(json)
    arms = _arms(configs, overrides)
    folder = run_dir or COMPARISONS / "-".join(arms)
    contest = Contest(folder, arms, seeds, instances)
    try:
        scores = _run(contest, console)
    except (KeyboardInterrupt, Terminated):
        say(console, f"go on with the same command and --run-dir {shlex.quote(str(folder))}")
        raise
    pairs = judge(scores, [instance.family for instance in contest.played()])
    console.print(_scores_table(scores))
    for pair in pairs:
        say(console, _sentence(pair))
    say(console, f"runs: {folder}")
    if json:
        print_json(_json(folder, pairs))


def _arms(configs: tuple[Path, ...], overrides: tuple[str, ...]) -> dict[str, TrainSettings]:
    """Settings by arm; files of one name are told apart by a number."""
    if len(configs) < 2:
        raise ConfigError("one configuration cannot be compared: give two or more")
    arms: dict[str, TrainSettings] = {}
    for config in configs:
        name, number = config.stem, 2
        while name in arms:
            name, number = f"{config.stem}-{number}", number + 1
        arms[name] = load_settings(TrainSettings, config, overrides)
    return arms


def _run(contest: Contest, console: Console) -> dict[str, Floats]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    iterations = {name: settings.iterations for name, settings in contest.arms.items()}
    total = contest.seeds * sum(iterations.values())
    with bar:
        shown = bar.add_task("starting", total=total)
        trials = contest.trials()

        def show(done: int, _trials: int, trial: Trial, iteration: Iteration | None) -> None:
            before = sum(iterations[one.arm] for one in trials[:done])
            now = 0 if iteration is None else iteration.number
            bar.update(shown, completed=before + now, description=f"{trial.arm}, seed {trial.seed}")

        scores = run_contest(contest, show)
        bar.update(shown, completed=total, description="all trials done")
    return scores


def _scores_table(scores: dict[str, Floats]) -> Table:
    table = Table(box=None)
    table.add_column("arm")
    table.add_column("mean score")
    table.add_column("by seed")
    for name, values in scores.items():
        by_seed = values.mean(1)
        table.add_row(name, f"{by_seed.mean():.3f}", " ".join(f"{value:.3f}" for value in by_seed))
    return table


def _sentence(pair: Pair) -> str:
    difference = pair.difference
    return (
        f"{pair.words}: {pair.first} less {pair.second} {difference.estimate:+.3f} "
        f"({difference.low:+.3f} to {difference.high:+.3f}), p {pair.p:.3f}, "
        f"{pair.first} better on {pair.probability_of_improvement:.0%} of instances"
    )


def _json(folder: Path, pairs: list[Pair]) -> dict[str, Any]:
    records = [
        {
            **asdict(pair),
            "difference": pair.difference.estimate,
            "interval": [pair.difference.low, pair.difference.high],
            "verdict": pair.words,
        }
        for pair in pairs
    ]
    words = records[0]["verdict"] if len(records) == 1 else "; ".join(pair.words for pair in pairs)
    return {"verdict": words, "pairs": records, "run": str(folder)}
