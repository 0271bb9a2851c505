"""The results of controllers and other arms on each instance, and the files that store them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from esper import __version__
from esper.control.learned import POLICY
from esper.errors import RunError
from esper.files import read_bounded, write_atomically
from esper.tasks.suite import Split

SPLITS: tuple[Split, ...] = ("heldout", "transfer")
"""The splits of an evaluation, in this order."""
MOST_BYTES = 256 * 2**20
"""Largest size of a file of results."""

T = TypeVar("T")
Bounds = tuple[float, float]
"""Both ends of an interval."""


# Results, and the Shapley values of kept seeds


@dataclass(frozen=True)
class Result:
    """The result of one controller, or another arm, on one instance; all scores are on test data."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    controller: str
    instance: str
    family: str
    variant: str
    score: float
    """``test_accuracy - rent * log1p(added_parameters / host_parameters)``."""
    test_accuracy: float
    added_parameters: Annotated[int, Field(ge=0, lt=2**53)]
    host_parameters: Annotated[int, Field(ge=1, lt=2**53)]
    split: Split | None = None
    """The split of the instance; only in an evaluation."""
    flops: Annotated[int, Field(ge=0)] | None = None
    """FLOPs of the network's whole training; only in a comparison."""

    @property
    def growth(self) -> float:
        """Number of added parameters divided by the host's."""
        return self.added_parameters / self.host_parameters

    def to_json(self) -> dict[str, Any]:
        """JSON values, without fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _require_flops(results: list[Result]) -> list[Result]:
    if any(result.flops is None for result in results):
        raise ValueError("the FLOPs of training are missing")
    return results


@dataclass(frozen=True)
class ArmResults:
    """Results of an arm on all instances of a comparison, in order; for a trained arm, those of one training seed."""

    environment_steps: Annotated[int, Field(ge=0)]
    """Number of decisions, over all networks, that training or searching for the arm took."""
    outcomes: Annotated[list[Result], AfterValidator(_require_flops)]


@dataclass(frozen=True)
class SeedValue:
    """A fossil at the end of an episode."""

    slot: int
    blueprint: str
    value: float
    """Shapley value: the fossil's part of the validation accuracy that all fossils add to the host."""
    standard_error: float
    """Standard error of the value; 0 if the value is exact."""


@dataclass(frozen=True)
class KeptPair:
    """Two fossils of one network."""

    first: int
    """The lower of the two slots."""
    second: int
    interaction: float
    """Accuracy that both add beyond what each adds alone (Grabisch, Roubens); positive if they help each other."""


@dataclass(frozen=True)
class SeedShapley:
    """Shapley values of all fossils of one episode."""

    instance: str
    family: str
    seeds: tuple[SeedValue, ...]
    pairs: tuple[KeptPair, ...]
    """Pairs of kept seeds; empty if the values are estimates."""


# Comparisons of arms


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison on the same instances: a way of training policies, or another kind of controller."""

    name: str
    seeds: Sequence[ArmResults]
    """Results by training seed; a single entry if the arm does not depend on training seeds."""

    @property
    def outcomes(self) -> list[list[Result]]:
        """Results by training seed."""
        return [results.outcomes for results in self.seeds]


@dataclass(frozen=True)
class ArmRecord:
    """The figures of one arm, with 95% intervals. Fields that compare with the reference are None for the reference."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    score: float
    score_interval: Bounds
    interquartile_mean: float
    by_seed: tuple[float, ...]
    accuracy: float
    accuracy_interval: Bounds
    added: float
    added_interval: Bounds
    flops: float | None
    flops_interval: Bounds | None
    environment_steps: int | None
    difference: float | None
    difference_interval: Bounds | None
    p: float | None
    probability_of_improvement: float | None
    verdict: str | None


@dataclass(frozen=True)
class ComparisonRecord:
    """A finished comparison in machine-readable form, with its claims in words."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    claim: str
    basis: str
    seeds: int
    instances: int
    reference: str
    standings: list[ArmRecord]


@dataclass(frozen=True)
class EvaluationRecord(ComparisonRecord):
    """The comparison of a run's policy with all other controllers on one split."""

    place: str
    """A phrase for the split's instances, for use in sentences."""
    answer: str


# Files


def select_split(results: Sequence[Result], split: Split) -> list[Result]:
    """The results of one split, in order."""
    return [result for result in results if result.split == split]


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Write results as a JSON list of records; raises RunError if that fails."""
    write_atomically(path, json.dumps([result.to_json() for result in results], indent=1))


def read_evaluation(path: Path, reference: str = POLICY) -> list[Result]:
    """Read the results of an evaluation, in which all controllers ran on the same instances of each split.

    ``reference`` is the controller that is compared with the others.
    """
    check = AfterValidator(partial(_require_comparable, reference))
    return read_json(path, TypeAdapter(Annotated[list[Result], check]))


def read_verdicts(path: Path) -> dict[Split, EvaluationRecord]:
    """Read the comparisons of an evaluated run, by split, from the file that is written with its report."""
    return read_json(path, _VERDICTS, "esper report")


def read_json(path: Path, kind: TypeAdapter[T], command: str = "esper evaluate") -> T:
    """Read a JSON file as values of ``kind``; error messages recommend ``command``, which writes such a file."""
    advice = f"`{command} {path.parent}`"
    try:
        return kind.validate_json(read_bounded(path, MOST_BYTES))
    except OSError as error:
        raise RunError(f"cannot read {path} ({error.strerror}): make it with {advice}") from error
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise RunError(f"{path} is damaged ({reason}): recreate it with {advice}") from error


def cache_key(*facts: Any) -> str:
    """A hash of everything that determines results: the versions of the software, and these JSON values."""
    return _compute_digest([__version__, str(torch.__version__), np.__version__, *facts])


def write_cached(path: Path, key: str, value: Any) -> None:
    """Write a JSON value together with the key under which it is valid."""
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {path.parent} ({error.strerror}): choose a writable folder") from error
    write_atomically(path, json.dumps({"cache_key": key, "sha256": _compute_digest(value), "value": value}))


def read_cached(path: Path, key: str | None, decode: Callable[[Any], T]) -> T | None:
    """The value that `write_cached` wrote under ``key``, or under any key if it is None; None if missing or damaged."""
    # If a cache cannot be read, its results are computed again.
    try:
        file = json.loads(read_bounded(path, MOST_BYTES))
        if file["sha256"] != _compute_digest(file["value"]) or key not in (None, file["cache_key"]):
            return None
        return decode(file["value"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def read_arm(path: Path, key: str | None = None) -> ArmResults | None:
    """Read an arm's results with `read_cached`."""
    return read_cached(path, key, _ARM.validate_python)


def load_or_compute(path: Path, key: str, compute: Callable[[], ArmResults]) -> ArmResults:
    """The results in the file if they are valid under ``key``; otherwise compute them and write the file."""
    results = read_arm(path, key)
    if results is None:
        results = compute()
        write_cached(path, key, _ARM.dump_python(results, mode="json", exclude_none=True))
    return results


def _compute_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _require_comparable(reference: str, results: list[Result]) -> list[Result]:
    if any(result.split is None for result in results):
        raise ValueError("the split of an instance is missing")
    # Comparisons are paired, so every controller must have the same instances as the reference.
    for split in SPLITS:
        instances: dict[str, list[str]] = {}
        for result in select_split(results, split):
            instances.setdefault(result.controller, []).append(result.instance)
        expected = instances.get(reference)
        if instances and (expected is None or any(names != expected for names in instances.values())):
            raise ValueError(f"the controllers did not all play the same {split} instances as {reference}")
    return results


_ARM = TypeAdapter(ArmResults)
_VERDICTS = TypeAdapter(dict[Split, EvaluationRecord])
