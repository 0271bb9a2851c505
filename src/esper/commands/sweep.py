"""`esper sweep`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from annotated_types import Interval
from rich.table import Table
from rich.text import Text

from esper.commands.options import Instances, Overrides, Seed, hint_if_stopped
from esper.config.loading import compare_settings
from esper.dash.formats import percent, score
from esper.dash.output import console_beside, plain_table, print_differences, print_json, print_line
from esper.dash.reporter import report_progress
from esper.errors import ConfigError, plural
from esper.extras import require_extra
from esper.train.settings import TrainSettings
from esper.train.workers import LOCAL, Computing

if TYPE_CHECKING:
    from esper.lab.sweep import RankedTrial

INSTANCES = 256
TRIALS = 20
MOST_TRIALS = 10_000
SWEEPS = Path("runs") / "sweeps"
CAUTION = (
    "Each trial has one training seed, so the best of many is partly luck. "
    "Use `esper compare` to train the best settings with several seeds and test the difference."
)


def command(
    space: Annotated[Path, tyro.conf.Positional],
    run_dir: Path | None = None,
    trials: Annotated[int, Interval(ge=1, le=MOST_TRIALS)] = TRIALS,
    seed: Seed = 0,
    instances: Instances = INSTANCES,
    pruner: Literal["median", "hyperband", "none"] = "median",
    overrides: Overrides = (),
    computing: Computing = LOCAL,
    json: bool = False,
) -> None:
    """Search over settings of `esper train` with an Optuna study (extra ``sweep``), and rank the trials.

    The YAML file has two keys: `base`, settings as for `esper train`, and `space`, which maps dotted settings to a list
    of values or a range {low, high, log, step}. Each trial is a run directory. --set overrides `base`.

    Args:
        space: YAML file with base and space.
        run_dir: Directory of the study and all runs (default: runs/sweeps/SPACE). With the directory of an interrupted
            sweep, it continues.
        trials: Total number of trials. If the lists have at most this many combinations, each is tried once.
        seed: Random seed of the search. Trials use the seed of their own settings.
        instances: Held-out instances that every policy plays.
        pruner: Optuna pruner, which stops weak trials early by their J after each iteration.
        json: Print a final line of JSON to stdout, and progress to stderr.
    """
    if instances < 1:
        raise ConfigError(f"{plural(instances, 'instance')} cannot give a score: give at least 1")
    require_extra("sweep", "`esper sweep`", "optuna")
    from esper.lab.sweep import Sweep, is_within, load_space, run_sweep  # noqa: PLC0415 (an extra)

    # What is searched, and what all trials share.
    console = console_beside(json)
    search_space = load_space(space, overrides)
    sweep = Sweep(run_dir or SWEEPS / space.stem, search_space, trials, seed, instances, pruner)
    shared = compare_settings(search_space.settings[0], TrainSettings())
    shared = [row for row in shared if not any(is_within(row.key, key) for key in search_space.distributions)]
    print_differences(console, "settings shared by all trials", shared)
    print_line(
        console, f"study: {sweep.url}; view it with `optuna-dashboard {sweep.url}` (pip install optuna-dashboard)"
    )

    # Train trial by trial, then rank them.
    with (
        hint_if_stopped(console, f"to continue, add --run-dir {shlex.quote(str(sweep.folder))} to the same command"),
        computing.open_workers(max(settings.shards for settings in search_space.settings)) as workers,
        report_progress(console, "starting") as progress,
    ):
        ranking = run_sweep(sweep, workers, lambda line: print_line(console, line), progress.update)
    console.print(draw_ranking(ranking))
    print_line(console, CAUTION)
    print_line(console, f"runs: {sweep.folder}")
    if json:
        print_json({"run": str(sweep.folder), "study": sweep.url, "ranking": [asdict(trial) for trial in ranking]})


def draw_ranking(ranking: list[RankedTrial]) -> Table:
    """A row per trial, best first, with means over the held-out instances; trials without a score come last."""
    table = plain_table("trial", "score", "accuracy", "added", "settings")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for column in table.columns[1:-1]:
        column.justify = "right"
    for trial in ranking:
        table.add_row(
            trial.trial,
            trial.state if trial.score is None else score(trial.score),
            "" if trial.accuracy is None else percent(trial.accuracy),
            "" if trial.added is None else percent(trial.added),
            Text(trial.settings_text),
        )
    return table
