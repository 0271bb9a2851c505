"""Comparisons on disk: those of `esper compare`, and evaluated runs that differ in their training seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.config import load_settings
from esper.errors import ConfigError, RunError
from esper.experiments.arms import POLICY
from esper.experiments.behaviour import read_behaviour
from esper.experiments.comparison import Comparison, compare_arms, compare_configurations, compare_over_seeds
from esper.experiments.results import (
    SPLITS,
    Arm,
    ArmResults,
    Outcomes,
    Result,
    read_arm,
    read_evaluation,
    read_outcomes,
    select_split,
)
from esper.experiments.settings import TrainSettings
from esper.settings import compare_settings
from esper.tasks.suite import Split
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import RunDirectory

RECORDS = "contest.json"
ARMS = "arms"
_TRIAL = "seed-"


@dataclass(frozen=True)
class FinishedComparison:
    """What is known of a comparison."""

    seeds: tuple[int, ...]
    """Training seeds that every configuration has done."""
    outcomes: Mapping[str, Outcomes]
    """By configuration, that which the others are compared with first."""
    arms: Comparison | None
    """The first one's policies among all other arms; None without `--arms`."""

    @property
    def configurations(self) -> Comparison:
        """The first configuration against each other one."""
        return compare_configurations(self.outcomes)


def is_comparison(folder: Path) -> bool:
    """Whether the folder holds trials of `esper compare`."""
    return any(folder.glob(f"*/{_TRIAL}*/config.yaml"))


def read_comparison(folder: Path) -> FinishedComparison:
    """Read a comparison, also while it goes on.

    Raises:
        RunError: nothing is done yet, or a file is damaged.
    """
    names = {path.parent.parent.name for path in folder.glob(f"*/{_TRIAL}*/{RECORDS}")}
    done = {name: _seeds(folder / name) for name in names}
    seeds = tuple(sorted(set[int].intersection(*done.values()))) if done else ()
    if not seeds:
        raise RunError(f"no training seed is done yet by every configuration in {folder}: go on with `esper compare`")
    order = sorted(names, key=lambda name: (_begun(folder / name / f"{_TRIAL}{seeds[0]}"), name))
    outcomes = {name: [_outcomes(folder / name / f"{_TRIAL}{seed}") for seed in seeds] for name in order}
    _require_same(folder, [own for several in outcomes.values() for own in several])
    return FinishedComparison(seeds, outcomes, _arms(folder / order[0], seeds))


def _seeds(arm: Path) -> set[int]:
    numbers = (path.parent.name.removeprefix(_TRIAL) for path in arm.glob(f"{_TRIAL}*/{RECORDS}"))
    return {int(number) for number in numbers if number.isdecimal()}


def _begun(trial: Path) -> float:
    """When the trial began, in seconds since 1970: with its first seed, the first configuration begins first."""
    with RunReader.open(RunDirectory(trial).store) as reader:
        ((time,),) = reader.rows("SELECT coalesce(min(time), 0.0) AS time FROM events")
    return time


def _outcomes(trial: Path) -> list[Result]:
    path = trial / RECORDS
    try:
        return read_outcomes(path)
    except RunError as error:
        raise RunError(f"{path} is damaged or of an old version: delete it, and call `esper compare` again") from error


def _require_same(folder: Path, played: Sequence[list[Result]]) -> None:
    """RunError unless all played the same instances."""
    if any([one.instance for one in own] != [one.instance for one in played[0]] for own in played):
        raise RunError(f"the policies in {folder} did not all play the same instances: call `esper compare` again")


def _arms(first: Path, seeds: Iterable[int]) -> Comparison | None:
    """Of those that have played for all seeds, if the policy has."""
    folders = [first / f"{_TRIAL}{seed}" / ARMS for seed in seeds]
    arms = {path.stem: [read_arm(path)] for path in sorted((first / ARMS).glob("*.json"))}
    for path in sorted(folders[0].glob("*.json")):
        files = [folder / path.name for folder in folders]
        if all(file.is_file() for file in files):
            arms[path.stem] = [read_arm(file) for file in files]
    policy = arms.pop(POLICY, None)
    if policy is None or not arms:
        return None
    own = _list_instances(policy[0])
    same = [Arm(name, records) for name, records in arms.items() if all(_list_instances(one) == own for one in records)]
    return compare_arms([Arm(POLICY, policy), *same])


def _list_instances(records: ArmResults) -> list[str]:
    return [one.instance for one in records.outcomes]


_SEED = "seed"


def read_over_seeds(paths: Sequence[Path]) -> dict[Split, Comparison]:
    """By split that every run was evaluated on.

    Raises:
        RunError: one is no run, is not evaluated, or they were evaluated differently or after other iterations.
        ConfigError: they differ in more than their seed, or two have the same one.
    """
    runs = [RunDirectory.open_own(path) for path in paths]
    _require_one_way(paths, [load_settings(TrainSettings, run.config) for run in runs])
    results = [read_evaluation(run.evaluation) for run in runs]
    _require_one_length(runs)
    found: dict[Split, Comparison] = {}
    for split in SPLITS:
        played = [select_split(own, split) for own in results]
        if all(played):
            try:
                found[split] = compare_over_seeds(played)
            except ValueError as error:
                raise RunError(f"{error}: evaluate them all with the same --instances and --transfer") from error
    return found


def _require_one_way(paths: Sequence[Path], trained: Sequence[TrainSettings]) -> None:
    for path, settings in zip(paths[1:], trained[1:], strict=True):
        differ = [one.key for one in compare_settings(settings, trained[0]) if one.key != _SEED]
        if differ:
            raise ConfigError(
                f"{path} was trained with other settings than {paths[0]} ({', '.join(differ)}): give runs that "
                "differ in their seed alone, or compare ways of training with `esper compare`"
            )
    seeds = [settings.seed for settings in trained]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(f"two of the runs have training seed {twice}: give every seed once")


def _require_one_length(runs: Sequence[RunDirectory]) -> None:
    played = [read_behaviour(run.behaviour).iteration for run in runs]
    for run, iteration in zip(runs, played, strict=True):
        if iteration != played[0]:
            raise RunError(
                f"{run.path} was evaluated after iteration {iteration}, {runs[0].path} after {played[0]}: train them "
                "equally long and evaluate them again"
            )
