"""A sweep: an Optuna study in SQLite, whose trials train one after the other and play the same instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from esper.errors import ConfigError, RunError
from esper.lab.experiment import play_policy
from esper.lab.report import write_report
from esper.numerics.random_streams import Stream, numpy_generator
from esper.runs.run_directory import STUDY, RunDirectory
from esper.tasks.registry import get_suite
from esper.train.iteration import Iteration
from esper.train.settings import TrainSettings
from esper.train.trainer import build_settings, train_controller
from esper.train.workers import Workers


def run_sweep(
    folder: Path,
    suggest: Callable[[optuna.Trial], TrainSettings | Mapping[str, Any]],
    trials: int,
    seed: int,
    count: int,
    workers: Workers,
    report_line: Callable[[str], None],
    progress: Callable[[float, float, str], None],
) -> list[FrozenTrial]:
    """Run trials until the study in ``folder`` has as many, and return those with a score, best first.

    ``suggest`` returns a trial's settings, as `train_controller` takes them. If they are refused, only this trial
    fails. Each policy plays the same ``count`` held-out instances.
    """

    def train(trial: optuna.Trial) -> float:
        name = f"trial-{trial.number:03}"
        run = RunDirectory(folder / name)

        def report(iteration: Iteration) -> None:
            progress(trial.number + iteration.number / iteration.total, trials, f"{name}, in trials")

        progress(trial.number, trials, f"{name}, in trials")
        try:
            settings = build_settings(suggest(trial))
            # Scores can be ranked only on one suite and the same instances.
            played = [settings.suite, count]
            if study.user_attrs.get("played", played) != played:
                raise RunError(f"{folder} was played on other instances than {played}: choose another --run-dir")
            train_controller(settings, run.path, workers=workers, watch=lambda _: nullcontext(report))
        except ConfigError as error:
            report_line(f"{name} is refused: {error}")
            raise
        study.set_user_attr("played", played)
        instances = get_suite(settings.suite).sample(count, "heldout", numpy_generator(Stream.SWEPT_INSTANCES))
        with run.locked("esper sweep"):
            outcomes = play_policy(run, settings, instances, workers).outcomes
        write_report(run)
        trial.set_user_attr("accuracy", mean(outcome.test_accuracy for outcome in outcomes))
        trial.set_user_attr("added", mean(outcome.growth for outcome in outcomes))
        score = mean(outcome.score for outcome in outcomes)
        report_line(f"{name}: score {score:.3f} {trial.params}")
        return score

    try:
        folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(
            storage=f"sqlite:///{folder / STUDY}", study_name="sweep", direction="maximize", load_if_exists=True
        )
        # A sweep that goes on draws otherwise than it began.
        done = len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed + done)
        study.optimize(train, n_trials=max(trials - done, 0), catch=ConfigError)
        finished = study.get_trials(states=(TrialState.COMPLETE,))
    except (OSError, optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise RunError(
            f"cannot use {folder / STUDY} ({reason}): choose another --run-dir, or free some space"
        ) from error
    return sorted(finished, key=lambda trial: -(trial.value or 0.0))
