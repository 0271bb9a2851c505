"""`esper sweep`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import tyro

from esper.commands.options import hint_if_stopped, require_seed
from esper.config.loading import Overrides
from esper.config.settings import compare_settings, shared_differences
from esper.dash.output import console_beside, print_json, say, say_differences
from esper.errors import ConfigError
from esper.lab.report.training import write_report
from esper.lab.sweep import BASE, CAUTION, Sweep, load_space, run_sweep
from esper.lab.sweep_view import SweepView, ranking_table
from esper.runs.run_directory import RunDirectory
from esper.train.settings import TrainSettings
from esper.train.workers import Backend

INSTANCES = 256
SWEEPS = Path("runs") / "sweeps"


def command(
    space: Annotated[Path, tyro.conf.Positional],
    run_dir: Path | None = None,
    trials: int | None = None,
    seed: int = 0,
    instances: int = INSTANCES,
    overrides: Overrides = (),
    backend: Literal["local", "ray"] = "local",
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Train controllers by many settings, each in a run directory of its own, and rank them.

    The space is a YAML file: `base` holds settings as for `esper train`, `grid` lists of values by dotted key, `random`
    lists or ranges {low, high, log, int} by dotted key. What --set says goes before `base`.

    Args:
        space: YAML file with base, grid and random.
        run_dir: Directory for all runs; by default one under runs/sweeps/ named after the space. Called again with the
            same one, a sweep goes on where it stopped.
        trials: Draws of the random settings, 8 by default; each is tried at every point of the grid.
        seed: Draws the random settings. Trials are trained with the seed of their own settings.
        instances: Held-out instances that every policy plays.
        backend: Processes of this machine, or Ray on this machine (extra ``ray``).
        workers: Trials computed at a time; by default one per core.
        json: Print a machine-readable last line; progress then goes to stderr.
    """
    if instances < 1:
        raise ConfigError(f"{instances} instances give no score: ask for at least 1")
    require_seed(seed)
    console = console_beside(json)
    computing = Backend(backend, workers)
    known = load_space(space, overrides)
    folder = run_dir or SWEEPS / space.stem
    sweep = Sweep(folder, known.trials(trials, seed), instances)
    say(console, f"{len(sweep.trials)} trials at {known.points} points of the grid")
    found = [compare_settings(trial.settings, TrainSettings()) for trial in sweep.trials]
    shared = [one for one in shared_differences(found) if known.part(one.key) == BASE]  # of a single trial, all are
    say_differences(console, "what all trials have in common", shared)
    with (
        hint_if_stopped(console, f"go on with the same command and --run-dir {shlex.quote(str(folder))}"),
        computing.open(len(sweep.trials)) as crew,
        SweepView(console, sweep.trials) as view,
    ):
        ranking = run_sweep(sweep, crew, view.hear, view.conclude)
    for trial in sweep.trials:
        write_report(RunDirectory(sweep.path(trial)))
    console.print(ranking_table(ranking))
    say(console, CAUTION)
    say(console, f"ranking: {sweep.ranking}")
    say(console, f"runs: {folder}")
    if json:
        ranked = [asdict(one) for one in ranking]
        print_json({"run": str(folder), "trials": len(sweep.trials), "best": ranking[0].trial, "ranking": ranked})
