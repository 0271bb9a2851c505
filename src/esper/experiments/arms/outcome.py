"""What an arm came to on every instance, and its file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict, Field, TypeAdapter

from esper import __version__
from esper.errors import RunError
from esper.experiments.arms.flops import Prices, training_flops
from esper.experiments.arms.occupancy import Occupancy, occupancy
from esper.experiments.evaluation_files import read_json
from esper.experiments.play import Played, Record
from esper.files import write_atomically
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite


@dataclass(frozen=True)
class Outcome(Record):
    """An arm's result on one instance."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    added_parameters: Annotated[int, Field(ge=0, lt=2**53)]
    host_parameters: Annotated[int, Field(ge=1, lt=2**53)]
    flops: Annotated[int, Field(ge=0)]
    """Of all its training."""


@dataclass(frozen=True)
class ArmRecords:
    """An arm's results on all instances of a contest, in their order."""

    environment_steps: Annotated[int, Field(ge=0)]
    """Decisions of single networks that finding the arm took."""
    outcomes: list[Outcome]


@dataclass(frozen=True)
class Shown:
    """What a controller did on its instances, and what it came to."""

    outcomes: list[Outcome]
    slots: list[Occupancy]
    """One per cohort."""


def shown(played: Played, suite: Suite) -> Shown:
    """Of the episodes that a controller has played."""
    slots = [occupancy(tally, suite) for tally in played.tallies]
    prices = Prices(suite)
    flops = [
        training_flops(suite, prices, tally.instances, own, np.stack(tally.running)).sum(0)
        for tally, own in zip(played.tallies, slots, strict=True)
    ]
    spent: list[int] = np.concatenate(flops).tolist()
    outcomes = [Outcome(**asdict(one), flops=cost) for one, cost in zip(played.records, spent, strict=True)]
    return Shown(outcomes, slots)


def circumstances(*facts: Any) -> str:
    """A digest of all that results follow from: the versions of what computes them, and these JSON values."""
    versions = [__version__, str(torch.__version__), np.__version__]
    return hashlib.sha256(json.dumps([versions, *facts], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _File:
    circumstances: str
    records: ArmRecords


_FILES = TypeAdapter(_File)


def read_records(path: Path) -> ArmRecords:
    """The records in the file, whatever they were computed under; RunError if it is missing or damaged."""
    return read_json(path, _FILES).records


def kept(path: Path, under: str, instances: Sequence[Instance], compute: Callable[[], ArmRecords]) -> ArmRecords:
    """The records in the file, if they were computed ``under`` these circumstances; otherwise computed and written.

    Raises:
        RunError: the file cannot be written. Whatever ``compute`` raises passes through.
    """
    try:
        found = read_json(path, _FILES)
    except RunError:
        found = None  # missing or damaged: computed anew
    names = [instance.name for instance in instances]
    if found and found.circumstances == under and [one.instance for one in found.records.outcomes] == names:
        return found.records
    records = compute()
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {path.parent} ({error.strerror}): choose a writable folder") from error
    write_atomically(path, json.dumps(asdict(_File(under, records))))
    return records
