"""`esper compare`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper.commands.compute import Computing
from esper.config import Overrides, load_settings
from esper.differences import differences
from esper.errors import ConfigError
from esper.experiments.arms.field import run_arms
from esper.experiments.arms.standings import Standing, standings
from esper.experiments.backend import LOCAL, Backend
from esper.experiments.compare.judgement import Pair, judge
from esper.experiments.compare.trials import Contest, Outcomes, Trial, run_contest, scores_of
from esper.experiments.iteration import Iteration
from esper.experiments.settings import TrainSettings
from esper.signals import Terminated
from esper.ui.arms import arms_json, arms_table
from esper.ui.arms import sentence as arm_sentence
from esper.ui.differences import say_differences
from esper.ui.formats import mega, percent, score
from esper.ui.output import console_beside, print_json, say
from esper.ui.report.arms import write_arms_report

SEEDS = 5
INSTANCES = 256
COMPARISONS = Path("runs") / "comparisons"


def command(
    configs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    seeds: int = SEEDS,
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
        seeds: Training seeds of each; fewer than 4 can show nothing.
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
    if len(configs) < 2 and not arms:
        raise ConfigError("one configuration cannot be compared: give two or more, or --arms")
    compared = _settings(configs, overrides)
    for name, settings in compared.items():
        say_differences(console, name, differences(settings, TrainSettings()))
    folder = run_dir or COMPARISONS / "-".join(compared)
    contest = Contest(folder, compared, seeds, instances)
    try:
        outcomes = _run(contest, computing, console)
        found = _standings(contest, computing, console) if arms else []
    except (KeyboardInterrupt, Terminated):
        say(console, f"go on with the same command and --run-dir {shlex.quote(str(folder))}")
        raise
    families = [instance.family for instance in contest.played()]
    pairs = judge({name: scores_of(own) for name, own in outcomes.items()}, families)
    console.print(_outcomes_table(outcomes))
    for pair in pairs:
        say(console, _sentence(pair))
    if found:
        _show_arms(contest, found, console)
    say(console, f"runs: {folder}")
    if json:
        print_json(_json(folder, outcomes, pairs, found))


def _settings(configs: tuple[Path, ...], overrides: tuple[str, ...]) -> dict[str, TrainSettings]:
    """By configuration; files of one name are told apart by a number."""
    compared: dict[str, TrainSettings] = {}
    for config in configs:
        name, number = config.stem, 2
        while name in compared:
            name, number = f"{config.stem}-{number}", number + 1
        compared[name] = load_settings(TrainSettings, config, overrides)
    return compared


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


def _standings(contest: Contest, computing: Backend, console: Console) -> list[Standing]:
    with _bar(console) as bar:
        shown = bar.add_task("loading the policies", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(shown, completed=done, total=total, description=what or "all arms played")

        return standings(run_arms(contest, show, computing))


def _show_arms(contest: Contest, found: list[Standing], console: Console) -> None:
    report = contest.folder / "arms.html"
    write_arms_report(report, found, seeds=contest.seeds, instances=contest.instances)
    console.print(arms_table(found))
    for one in found:
        say(console, arm_sentence(one))
    say(console, f"report: {report}")


def _run(contest: Contest, computing: Backend, console: Console) -> dict[str, Outcomes]:
    bar = _bar(console)
    iterations = {name: settings.iterations for name, settings in contest.arms.items()}
    total = contest.seeds * sum(iterations.values())
    with bar:
        shown = bar.add_task("starting", total=total)
        trials = contest.trials()

        def show(done: int, _trials: int, trial: Trial, iteration: Iteration | None) -> None:
            before = sum(iterations[one.arm] for one in trials[:done])
            now = 0 if iteration is None else iteration.number
            bar.update(shown, completed=before + now, description=f"{trial.arm}, seed {trial.seed}")

        outcomes = run_contest(contest, show, computing)
        bar.update(shown, completed=total, description="all trials done")
    return outcomes


def _outcomes_table(outcomes: dict[str, Outcomes]) -> Table:
    """Means: of scores, of accuracies on test data, of added parameters over the host's, of training FLOPs."""
    table = Table(box=None)
    for column in ("arm", "score", "accuracy", "added", "MFLOP"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    table.add_column("score by seed")
    for name, own in outcomes.items():
        means = _means(own)
        table.add_row(
            name,
            score(means["score"]),
            percent(means["accuracy"]),
            percent(means["added"]),
            mega(means["flops"]),
            " ".join(score(value) for value in scores_of(own).mean(1).tolist()),
        )
    return table


def _means(outcomes: Outcomes) -> dict[str, float]:
    """Over seeds and instances."""
    every = [one for own in outcomes for one in own]
    return {
        "score": mean(one.score for one in every),
        "accuracy": mean(one.test_accuracy for one in every),
        "added": mean(one.growth for one in every),
        "flops": mean(one.flops for one in every),
    }


def _sentence(pair: Pair) -> str:
    difference = pair.difference
    return (
        f"{pair.words}: {pair.first} less {pair.second} {difference.estimate:+.3f} "
        f"({difference.low:+.3f} to {difference.high:+.3f}), p {pair.p:.3f}, "
        f"{pair.first} better on {pair.probability_of_improvement:.0%} of instances"
    )


def _json(folder: Path, outcomes: dict[str, Outcomes], pairs: list[Pair], found: list[Standing]) -> dict[str, Any]:
    records = [
        {
            **asdict(pair),
            "difference": pair.difference.estimate,
            "interval": [pair.difference.low, pair.difference.high],
            "verdict": pair.words,
        }
        for pair in pairs
    ]
    words = [pair.words for pair in pairs]
    if not pairs:  # one configuration: all there is to say is about the arms
        words = [f"{one.arm}: {one.against.verdict}" for one in found if one.against is not None]
    means = {name: {**_means(own), "by_seed": scores_of(own).mean(1).tolist()} for name, own in outcomes.items()}
    record = {"verdict": "; ".join(words), "means": means, "pairs": records, "run": str(folder)}
    return {**record, "arms": arms_json(found)} if found else record
