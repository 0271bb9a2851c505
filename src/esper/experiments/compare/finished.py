"""A comparison as it lies on disk: what the trials that are done came to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from esper.errors import RunError
from esper.experiments.arms.field import POLICY, Arm
from esper.experiments.arms.outcome import ArmRecords, Outcome, read_records
from esper.experiments.compare.contrasts import compare_arms, compare_configurations
from esper.experiments.compare.trials import Outcomes
from esper.experiments.comparison import Comparison
from esper.experiments.evaluation_files import read_json
from esper.experiments.run_directory import RunDirectory
from esper.telemetry.reader import RunReader

RECORDS = "contest.json"
ARMS = "arms"
_SEED = "seed-"
_OUTCOMES = TypeAdapter(list[Outcome])


@dataclass(frozen=True)
class Finished:
    """What is known of a comparison."""

    seeds: tuple[int, ...]
    """Training seeds that every configuration has done."""
    outcomes: dict[str, Outcomes]
    """By configuration, that which the others are compared with first."""
    arms: Comparison | None
    """The first one's policies among all other arms; None without `--arms`."""

    @property
    def configurations(self) -> Comparison:
        """The first configuration against each other one."""
        return compare_configurations(self.outcomes)


def is_comparison(folder: Path) -> bool:
    """Whether the folder holds trials of `esper compare`."""
    return any(folder.glob(f"*/{_SEED}*/config.yaml"))


def read_finished(folder: Path) -> Finished:
    """Read a comparison, also while it goes on.

    Raises:
        RunError: nothing is done yet, or a file is damaged.
    """
    names = {path.parent.parent.name for path in folder.glob(f"*/{_SEED}*/{RECORDS}")}
    done = {name: _seeds(folder / name) for name in names}
    seeds = tuple(sorted(set[int].intersection(*done.values()))) if done else ()
    if not seeds:
        raise RunError(f"no training seed is done yet by every configuration in {folder}: go on with `esper compare`")
    order = sorted(names, key=lambda name: (_begun(folder / name / f"{_SEED}{seeds[0]}"), name))
    outcomes = {name: [_outcomes(folder / name / f"{_SEED}{seed}") for seed in seeds] for name in order}
    _require_same(folder, [own for several in outcomes.values() for own in several])
    return Finished(seeds, outcomes, _arms(folder / order[0], seeds))


def _seeds(arm: Path) -> set[int]:
    numbers = (path.parent.name.removeprefix(_SEED) for path in arm.glob(f"{_SEED}*/{RECORDS}"))
    return {int(number) for number in numbers if number.isdecimal()}


def _begun(trial: Path) -> float:
    """When the trial began, in seconds since 1970: with its first seed, the first configuration begins first."""
    with RunReader.open(RunDirectory(trial).store) as reader:
        ((time,),) = reader.rows("SELECT coalesce(min(time), 0.0) AS time FROM events")
    return time


def _outcomes(trial: Path) -> list[Outcome]:
    path = trial / RECORDS
    try:
        return read_json(path, _OUTCOMES)
    except RunError as error:
        raise RunError(f"{path} is damaged or of an old version: delete it, and call `esper compare` again") from error


def _require_same(folder: Path, played: Sequence[list[Outcome]]) -> None:
    """RunError unless all played the same instances."""
    if any([one.instance for one in own] != [one.instance for one in played[0]] for own in played):
        raise RunError(f"the policies in {folder} did not all play the same instances: call `esper compare` again")


def _arms(first: Path, seeds: Iterable[int]) -> Comparison | None:
    """Of those that have played for all seeds, if the policy has."""
    folders = [first / f"{_SEED}{seed}" / ARMS for seed in seeds]
    arms = {path.stem: [read_records(path)] for path in sorted((first / ARMS).glob("*.json"))}
    for path in sorted(folders[0].glob("*.json")):
        files = [folder / path.name for folder in folders]
        if all(file.is_file() for file in files):
            arms[path.stem] = [read_records(file) for file in files]
    policy = arms.pop(POLICY, None)
    if policy is None or not arms:
        return None
    own = _played(policy[0])
    same = [Arm(name, records) for name, records in arms.items() if all(_played(one) == own for one in records)]
    return compare_arms([Arm(POLICY, policy), *same])


def _played(records: ArmRecords) -> list[str]:
    return [one.instance for one in records.outcomes]
