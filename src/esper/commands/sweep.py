"""`esper sweep`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import tyro
from annotated_types import Interval
from rich.text import Text

from esper.commands.options import Instances, Seed, hint_if_stopped
from esper.config.settings import MOST_AT_ONCE
from esper.control.own import load_function
from esper.dash.formats import percent, score
from esper.dash.output import console_beside, plain_table, print_json, print_line
from esper.dash.reporter import report_progress
from esper.errors import ConfigError, plural
from esper.extras import require_extra
from esper.runs.run_directory import STUDY
from esper.train.workers import LOCAL, Computing

INSTANCES = 256
TRIALS = 20
MOST_TRIALS = 10_000
SWEEPS = Path("runs") / "sweeps"
CAUTION = (
    "Each trial has one training seed, so the best of many is partly luck. "
    "Use `esper compare` to train the best settings with several seeds and test the difference."
)


def command(
    suggest: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:FUNCTION")],
    run_dir: Path | None = None,
    trials: Annotated[int, Interval(ge=1, le=MOST_TRIALS)] = TRIALS,
    seed: Seed = 0,
    instances: Instances = INSTANCES,
    computing: Computing = LOCAL,
    json: bool = False,
) -> None:
    """Search over settings of `esper train` with an Optuna study (extra ``sweep``), and rank the trials.

    FUNCTION takes an Optuna trial and returns a mapping of settings, such as
    {"iterations": 20, "ppo.clip": trial.suggest_float("clip", 0.1, 0.3)}. Each trial is a run directory.

    Args:
        suggest: Python file, and the name of the function in it.
        run_dir: Directory of the study and all runs (default: runs/sweeps/FILE). A study that is there continues.
        trials: Total number of trials, including those of earlier calls.
        seed: Random seed of the search. Trials use the seed of their own settings.
        instances: Held-out instances that every policy plays.
        json: Print a final line of JSON to stdout, and progress to stderr.
    """
    if instances < 1:
        raise ConfigError(f"{plural(instances, 'instance')} cannot give a score: give at least 1")
    require_extra("sweep", "`esper sweep`", "optuna")
    from esper.lab.sweep import run_sweep  # noqa: PLC0415 (an extra)

    console = console_beside(json)
    function = load_function(suggest, "function")
    folder = run_dir or SWEEPS / Path(suggest.rpartition(":")[0]).stem
    url = f"sqlite:///{folder / STUDY}"
    print_line(console, f"study: {url}; view it with `optuna-dashboard {url}` (pip install optuna-dashboard)")
    with (
        hint_if_stopped(console, f"to continue, add --run-dir {shlex.quote(str(folder))} to the same command"),
        computing.open_workers(MOST_AT_ONCE) as workers,  # each trial says how many shards it has
        report_progress(console, "starting", trials) as progress,
    ):
        ranked = run_sweep(
            folder, function, trials, seed, instances, workers, lambda line: print_line(console, line), progress.update
        )
    # Means over the held-out instances: accuracy on test data, and added parameters relative to the host's.
    ranking: list[dict[str, Any]] = [
        {"trial": f"trial-{trial.number:03}", "score": trial.value, **trial.user_attrs, "chosen": trial.params}
        for trial in ranked
    ]
    table = plain_table("trial", "score", "accuracy", "added", "chosen")
    for row in ranking:
        chosen = " ".join(f"{name}={value}" for name, value in row["chosen"].items())
        figures = score(row["score"]), percent(row["accuracy"]), percent(row["added"])
        table.add_row(row["trial"], *figures, Text(chosen))
    console.print(table)
    print_line(console, CAUTION)
    print_line(console, f"runs: {folder}")
    if json:
        print_json({"run": str(folder), "study": url, "ranking": ranking})
