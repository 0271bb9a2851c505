"""`esper sweep`: an Optuna study in SQLite, whose trials train one after the other and play the same instances."""

import shlex
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro
from annotated_types import Interval
from rich.text import Text

from esper.commands.options import Instances, Seed, hint_if_stopped
from esper.config.settings import MOST_AT_ONCE
from esper.control.controller import load_function
from esper.dash.formats import percent, score
from esper.dash.output import console_beside, plain_table, print_json, print_line, report_progress
from esper.errors import ConfigError, RunError, plural
from esper.extras import require_extra
from esper.lab.experiment import play_policy
from esper.lab.report import write_report
from esper.numerics.random_streams import Stream, numpy_generator
from esper.runs.run_directory import STUDY, RunDirectory
from esper.tasks.registry import get_suite
from esper.train.iteration import Iteration
from esper.train.trainer import build_settings, train_controller
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
    import optuna  # noqa: PLC0415 (an extra)
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 (of the same extra)

    console = console_beside(json)
    choose_settings = load_function(suggest, "function")
    folder = run_dir or SWEEPS / Path(suggest.rpartition(":")[0]).stem
    url = f"sqlite:///{folder / STUDY}"
    print_line(console, f"study: {url}; view it with `optuna-dashboard {url}` (pip install optuna-dashboard)")

    def train(trial: optuna.Trial) -> float:
        name = f"trial-{trial.number:03}"
        run = RunDirectory(folder / name)

        def report(iteration: Iteration) -> None:
            progress.update(trial.number + iteration.number / iteration.total)

        progress.update(trial.number, trials, f"{name}, in trials")
        try:
            settings = build_settings(choose_settings(trial))
            # Scores can be ranked only on one suite and the same instances.
            played = [settings.suite, instances]
            if study.user_attrs.get("played", played) != played:
                raise RunError(f"{folder} was played on other instances than {played}: choose another --run-dir")
            train_controller(settings, run.path, workers=workers, watch=lambda _: nullcontext(report))
        except ConfigError as error:
            print_line(console, f"{name} is refused: {error}")
            raise
        study.set_user_attr("played", played)
        sample = get_suite(settings.suite).sample(instances, "heldout", numpy_generator(Stream.SWEPT_INSTANCES))
        with run.locked("esper sweep"):
            outcomes = play_policy(run, settings, sample, workers).outcomes
        write_report(run)
        trial.set_user_attr("accuracy", mean(outcome.test_accuracy for outcome in outcomes))
        trial.set_user_attr("added", mean(outcome.growth for outcome in outcomes))
        value = mean(outcome.score for outcome in outcomes)
        print_line(console, f"{name}: score {value:.3f} {trial.params}")
        return value

    with (
        hint_if_stopped(console, f"to continue, add --run-dir {shlex.quote(str(folder))} to the same command"),
        computing.open_workers(MOST_AT_ONCE) as workers,  # each trial says how many shards it has
        report_progress(console, "starting", trials) as progress,
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            study = optuna.create_study(storage=url, study_name="sweep", direction="maximize", load_if_exists=True)
            # A sweep that goes on draws otherwise than it began.
            done = len(study.trials)
            study.sampler = optuna.samplers.TPESampler(seed=seed + done)
            study.optimize(train, n_trials=max(trials - done, 0), catch=ConfigError)
            finished = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
        except (OSError, optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise RunError(
                f"cannot use {folder / STUDY} ({reason}): choose another --run-dir, or free some space"
            ) from error

    # The ranking, best first: means over the held-out instances, with added parameters relative to the host's.
    table = plain_table("trial", "score", "accuracy", "added", "chosen")
    ranking: list[dict[str, Any]] = []
    for trial in sorted(finished, key=lambda trial: -(trial.value or 0.0)):
        name, attributes = f"trial-{trial.number:03}", trial.user_attrs
        ranking.append({"trial": name, "score": trial.value, **attributes, "chosen": trial.params})
        chosen = " ".join(f"{name}={value}" for name, value in trial.params.items())
        figures = score(trial.value or 0.0), percent(attributes["accuracy"]), percent(attributes["added"])
        table.add_row(name, *figures, Text(chosen))
    console.print(table)
    print_line(console, CAUTION)
    print_line(console, f"runs: {folder}")
    if json:
        print_json({"run": str(folder), "study": url, "ranking": ranking})
