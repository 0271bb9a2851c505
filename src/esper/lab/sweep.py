"""A sweep: trials of one space, trained one after the other, stored in an Optuna study in SQLite, and ranked.

The study is study.db in the sweep's folder, where each trial also has its own run directory. An interrupted or killed
sweep continues from these.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Literal, cast

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from pydantic import Field
from sqlalchemy.exc import SQLAlchemyError

from esper.config.loading import find_override, load_settings, merge_override, put_value, validate_settings
from esper.config.settings import Settings
from esper.dash.formats import score
from esper.errors import ConfigError, RunError
from esper.lab.experiment import train_and_play
from esper.lab.report.training import write_report
from esper.numerics.random_streams import Stream, numpy_generator
from esper.runs.reader import RunReader
from esper.runs.run_directory import STUDY, RunDirectory, hold_lock
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.train.collect import check_start_policy
from esper.train.results import Result
from esper.train.settings import TrainSettings
from esper.train.workers import Workers

LOCK_OWNER = "esper sweep"
"""The command written into the locks of a sweep's folder and of its trials' run directories."""
PRUNERS: dict[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "median": lambda iterations: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=iterations // 4),
    "hyperband": lambda iterations: optuna.pruners.HyperbandPruner(max(iterations // 9, 1), iterations),
    "none": lambda iterations: optuna.pruners.NopPruner(),  # noqa: ARG005
}
"""Functions that make Optuna's pruners for a number of iterations, by name."""
Progress = Callable[[float, float, str], None]
"""Called with the number of finished trials, including a fraction for the current one, the number of all trials, and
what the current one is doing."""


class Range(Settings):
    """Numbers between two bounds, both inclusive."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    log: bool = False
    """Whether to sample uniformly in the logarithm."""
    step: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Distance between neighbouring values; without it, 1 for settings that are integers, and none for others."""


class _SweepFile(Settings):
    """The contents of a space's YAML file."""

    base: dict[str, Any] = {}
    space: dict[str, Any] = {}


@dataclass(frozen=True)
class SweepSpace:
    """Settings shared by all trials, and the distribution of each searched dotted key."""

    path: Path
    text: str
    """Shared settings and searched values as YAML, for comparing spaces."""
    base: Mapping[str, Any]
    overrides: Sequence[str]
    """Overrides ``dotted.key=value``, which ``base`` already includes."""
    lists: dict[str, dict[Any, Any]] = field(default_factory=dict[str, dict[Any, Any]])
    """Values of each listed setting by their form in the study: plain values unchanged, lists and mappings as YAML."""
    distributions: dict[str, BaseDistribution] = field(default_factory=dict[str, BaseDistribution])
    settings: list[TrainSettings] = field(default_factory=list[TrainSettings])
    """The shared settings with one searched value each, all validated."""

    @property
    def combinations(self) -> float:
        """Number of combinations; infinite if there is a range."""
        return math.prod(map(len, self.lists.values())) if len(self.lists) == len(self.distributions) else math.inf

    def iterate_combinations(self) -> Iterator[dict[str, Any]]:
        """Parameters of each combination of a space of lists, one at a time."""
        # The first key varies fastest.
        for params in itertools.product(*reversed(self.lists.values())):
            yield dict(zip(self.lists, reversed(params), strict=True))

    def decode_values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Values of settings by dotted key, from a study's parameters."""
        return {key: self.lists[key][param] if key in self.lists else param for key, param in params.items()}

    def build_settings(self, values: Mapping[str, Any], name: str = "") -> TrainSettings:
        """The shared settings with these values of searched keys.

        Raises:
            ConfigError: a value or their combination is not allowed; the message names their source.
        """
        merged = dict(self.base)
        for key, value in values.items():
            put_value(TrainSettings, merged, key, value, f"{self.path}: space: `{key}`")

        def describe_source(key: str) -> str:
            if any(is_within(key, searched) for searched in values):
                return f"{self.path}: space: "
            if not key or any(is_within(searched, key) for searched in values):
                return f"{self.path}: {name or 'space'} ({describe_values(values)}): "
            override = find_override(key, self.overrides)
            return f"{self.path}: base: " if override is None else f"--set {override}: "

        return validate_settings(TrainSettings, merged, describe_source)


def load_space(path: Path, overrides: Sequence[str] = ()) -> SweepSpace:
    """Read a space from a YAML file, with ``dotted.key=value`` overrides of its base.

    Every value is validated separately, with the shared settings; combinations are never enumerated.

    Raises:
        ConfigError: the file cannot be read or is not valid YAML, a key is unknown, a value is not allowed, there is
            nothing to search, or a searched key is overridden.
    """
    file = load_settings(_SweepFile, path)
    # A sweep without a search would be one training.
    if not file.space:
        raise ConfigError(f"{path} has nothing to search: list values or ranges of settings under `space`")
    base = dict(file.base)
    for override in overrides:
        merge_override(TrainSettings, base, override)
        key = override.partition("=")[0].strip()
        if any(is_within(key, searched) for searched in file.space):
            raise ConfigError(f"--set {override}: `{key}` is in `space` of {path}: leave it in one of them")

    space = SweepSpace(path, yaml.safe_dump({"base": base, "space": file.space}), base, overrides)
    for key, values in file.space.items():
        source = f"{path}: space: `{key}`"
        if isinstance(values, list) and values:
            plain = (str, int, float, bool, type(None))
            choices = {
                choice if isinstance(choice, plain) else _to_yaml(choice): choice
                for choice in cast("list[Any]", values)
            }
            space.settings.extend(space.build_settings({key: choice}) for choice in choices.values())
            space.lists[key], space.distributions[key] = choices, CategoricalDistribution(list(choices))
        elif isinstance(values, dict):
            # Both bounds are validated as settings; the setting's type determines the type of the distribution.
            limits = validate_settings(Range, cast("dict[str, Any]", values), lambda _, source=source: f"{source}: ")
            bounds = [space.build_settings({key: bound}) for bound in (limits.low, limits.high)]
            space.settings.extend(bounds)
            lowest: Any = bounds[0]
            for part in key.split("."):
                lowest = getattr(cast("Any", lowest)[0] if isinstance(lowest, tuple) else lowest, part)
            if isinstance(lowest, bool) or not isinstance(lowest, int | float):
                raise ConfigError(f"{source} is not a number: give a list of values")
            try:
                if isinstance(lowest, float):
                    space.distributions[key] = FloatDistribution(limits.low, limits.high, limits.log, limits.step)
                elif (limits.step or 1.0).is_integer():
                    step = int(limits.step or 1)
                    space.distributions[key] = IntDistribution(int(limits.low), int(limits.high), limits.log, step)
                else:
                    raise ValueError(f"step is {limits.step}, but the setting is an integer")
            except ValueError as error:
                raise ConfigError(f"{source}: {error}") from error
        else:
            raise ConfigError(f"{source} must be a list of values, or low and high, not {values!r}")
    # Scores on different suites have different scales.
    suites = sorted({settings.suite for settings in space.settings})
    if len(suites) > 1:
        raise ConfigError(f"the trials train on different suites ({', '.join(suites)}): they cannot be ranked")
    return space


def is_within(key: str, other: str) -> bool:
    """Whether a dotted key equals another one or is below it."""
    return key == other or key.startswith((f"{other}.", f"{other}["))


def describe_values(values: Mapping[str, Any]) -> str:
    """The values as text, such as ``ppo.epochs=4 seed=1``; numbers have four digits."""
    return " ".join(f"{key}={value:.4g}" if type(value) is float else f"{key}={value}" for key, value in values.items())


@dataclass(frozen=True)
class RankedTrial:
    """A trial's score, as a mean over the held-out instances, or why it has none."""

    trial: str
    choices: Mapping[str, Any]
    state: Literal["finished", "pruned", "refused"]
    score: float | None
    accuracy: float | None
    """Mean accuracy on test data."""
    added: float | None
    """Mean ratio of the number of added parameters to the host's."""
    refusal: str | None
    """Why the combination of settings is not allowed; None if it is."""

    @property
    def settings_text(self) -> str:
        """The trial's settings as one line."""
        return describe_values(self.choices)


@dataclass(frozen=True)
class Sweep:
    """The trials of a space, and how they are sampled, pruned and scored."""

    folder: Path
    space: SweepSpace
    trials: int
    """Number of trials, including those that are pruned or rejected."""
    seed: int
    """Seed of the sampler."""
    instances: int
    """Number of held-out instances on which every policy is evaluated."""
    pruner: str
    """A name in `PRUNERS`."""

    @property
    def url(self) -> str:
        """The URL of the study, for Optuna's tools."""
        return f"sqlite:///{self.folder / STUDY}"


def run_sweep(
    sweep: Sweep, workers: Workers, report_line: Callable[[str], None], progress: Progress
) -> list[RankedTrial]:
    """Run all trials and rank them, best first.

    ``report_line`` is called with a line about each event, ``progress`` with the sweep's progress.

    Raises:
        ConfigError: the folder contains another sweep or anything else.
        RunError: the folder is in use, damaged or cannot be written, or a worker process died.
    """
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {sweep.folder} ({error.strerror}): choose another --run-dir") from error
    with hold_lock(sweep.folder / "sweep.lock", LOCK_OWNER):
        try:
            return _run_trials(sweep, workers, report_line, progress)
        except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            advice = "free some space if there is none left, or choose another --run-dir"
            raise RunError(f"cannot use {sweep.folder / STUDY} ({reason}): {advice}") from error


def _run_trials(
    sweep: Sweep, workers: Workers, report_line: Callable[[str], None], progress: Progress
) -> list[RankedTrial]:
    space, example = sweep.space, sweep.space.settings[0]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=optuna.storages.RDBStorage(sweep.url),
        study_name="sweep",
        direction="maximize",
        pruner=PRUNERS[sweep.pruner](example.iterations),
        load_if_exists=True,
    )

    # Scores can be ranked only within one space and on the same instances.
    text = f"instances: {sweep.instances}\n{space.text}"
    if study.user_attrs.get("sweep", text) != text:
        raise ConfigError(
            f"{sweep.folder} holds a sweep with another space or other instances: choose another --run-dir"
        )
    if not study.get_trials() and any(sweep.folder.glob("*/config.yaml")):
        raise ConfigError(f"{sweep.folder} holds other runs: choose another --run-dir")
    study.set_user_attr("sweep", text)
    suite = get_suite(example.suite)
    instances = suite.sample(sweep.instances, "heldout", numpy_generator(Stream.SWEPT_INSTANCES))

    # This process has the lock, so a trial marked as running was interrupted or killed. It is queued again and its
    # training continues, because equal parameters share a run directory.
    for stopped in study.get_trials(states=(TrialState.RUNNING,)):
        if stopped.params.keys() == space.distributions.keys():
            study.enqueue_trial(stopped.params)
        study.tell(stopped.number, state=TrialState.FAIL)

    while True:
        trials = study.get_trials()
        runs: dict[str, str] = {
            _params_key(trial.params): trial.user_attrs["run"] for trial in trials if "run" in trial.user_attrs
        }
        scored = (TrialState.COMPLETE, TrialState.PRUNED)
        ended = [trial for trial in trials if trial.state in scored or "refusal" in trial.user_attrs]
        waiting = any(trial.state is TrialState.WAITING for trial in trials)
        # If there are few combinations, each is tried once; otherwise the sampler chooses. It is seeded for every
        # trial, so that an interrupted sweep makes the same choices as an uninterrupted one.
        if space.combinations <= sweep.trials:
            untried = next((params for params in space.iterate_combinations() if _params_key(params) not in runs), None)
            if untried is None and not waiting:
                break
            if untried is not None and not waiting:
                study.enqueue_trial(untried)
        elif len(ended) >= sweep.trials:
            break
        seed = int(numpy_generator(sweep.seed, len(ended), Stream.SWEPT_SETTINGS).integers(1 << 31))
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = study.ask(space.distributions)
        name = runs.get(_params_key(trial.params), f"trial-{len(set(runs.values())):03}")
        trial.set_user_attr("run", name)

        def report_share(share: float, phase: str, ended: int = len(ended)) -> None:
            progress(ended + share, min(space.combinations, sweep.trials), f"{phase}, in trials")

        report_share(0.0, name)
        _run_trial(sweep, study, trial, name, instances, workers, report_line, report_share)

    # Trials with equal parameters count as one.
    ranking: dict[str, RankedTrial] = {}
    for frozen in sorted(ended, key=lambda trial: trial.state is TrialState.COMPLETE):
        attrs, finished = frozen.user_attrs, frozen.state is TrialState.COMPLETE
        state = "finished" if finished else "pruned" if frozen.state is TrialState.PRUNED else "refused"
        ranking[attrs["run"]] = RankedTrial(
            trial=attrs["run"],
            choices=space.decode_values(frozen.params),
            state=state,
            score=frozen.value if finished else None,
            accuracy=attrs.get("accuracy"),
            added=attrs.get("added"),
            refusal=attrs.get("refusal"),
        )
    return sorted(ranking.values(), key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.trial))


def _run_trial(
    sweep: Sweep,
    study: optuna.Study,
    trial: optuna.Trial,
    name: str,
    instances: Sequence[Instance],
    workers: Workers,
    report_line: Callable[[str], None],
    report_share: Callable[[float, str], None],
) -> None:
    """Train with the trial's settings and score the policy, unless the settings are rejected or the trial is pruned."""
    # Only a combination can be invalid here: single values were validated when the space was read.
    values = sweep.space.decode_values(trial.params)
    settings_text, run = describe_values(values), RunDirectory(sweep.folder / name)
    outcomes: list[Result] | None = None
    try:
        settings = sweep.space.build_settings(values, name)
        check_start_policy(settings)

        # A resumed run yields only new iterations; the study gets earlier ones from the run's store.
        past: list[tuple[int, float]] = []
        if run.has_store:
            with RunReader.open(run.store) as reader:
                past = reader.series("objective")
        for number, objective in past:
            trial.report(objective, number)
        report_line(f"{name}: {f'resuming after iteration {len(past)}, ' if past else ''}{settings_text}")
        pruned = 0 < len(past) < settings.iterations and trial.should_prune()
        with closing(train_and_play(run.path, settings, instances, workers, LOCK_OWNER)) as training:
            while outcomes is None and not pruned:
                try:
                    iteration = next(training)
                except StopIteration as end:
                    outcomes = end.value.outcomes
                    continue
                number, total = iteration.number, iteration.total
                if number > len(past):
                    trial.report(iteration.objective, number)
                    pruned = number < total and trial.should_prune()
                line = f"{name}: iteration {number}/{total}, J {score(iteration.objective)}"
                report_share(number / total, line)
                if number == total:
                    report_line(line)
    except ConfigError as error:
        trial.set_user_attr("refusal", str(error))
        study.tell(trial, state=TrialState.FAIL)
        report_line(f"{name}: refused: {error}")
        return
    if outcomes is None:
        study.tell(trial, state=TrialState.PRUNED)
        report_line(f"{name}: pruned ({settings_text})")
        return

    # The report is in the trial's run, as for any other training.
    write_report(run)
    trial.set_user_attr("accuracy", mean(outcome.test_accuracy for outcome in outcomes))
    trial.set_user_attr("added", mean(outcome.growth for outcome in outcomes))
    value = mean(outcome.score for outcome in outcomes)
    study.tell(trial, value)
    report_line(f"{name}: score {score(value)} ({settings_text})")


def _to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip()


def _params_key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)
