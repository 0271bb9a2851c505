"""What an evaluation measured, and its file in the run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from esper.control.learned import LearnedController
from esper.experiments.evaluation_files import read_json
from esper.experiments.play import Record
from esper.files import write_atomically
from esper.tasks.suite import Split

SPLITS: tuple[Split, ...] = ("heldout", "transfer")
"""What is evaluated on, in this order."""


@dataclass(frozen=True)
class Result(Record):
    """One controller's result on one instance of a split; all scores are on test data."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    added_parameters: Annotated[int, Field(ge=0, lt=2**53)]
    host_parameters: Annotated[int, Field(ge=1, lt=2**53)]
    split: Split


def of_split(results: Sequence[Result], split: Split) -> list[Result]:
    """Those of one split, in order."""
    return [result for result in results if result.split == split]


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Write them as a JSON list of records; RunError if that fails."""
    write_atomically(path, json.dumps([asdict(result) for result in results], indent=1))


def read_results(path: Path) -> list[Result]:
    """The results that :func:`write_results` wrote.

    Raises:
        RunError: the file is missing, or holds something else.
    """
    return read_json(path, _RESULTS)


def _comparable(results: list[Result]) -> list[Result]:
    splits: set[Split] = {result.split for result in results}
    for split in splits:
        played: dict[str, list[str]] = {}
        for result in of_split(results, split):
            played.setdefault(result.controller, []).append(result.instance)
        if LearnedController.name not in played or any(
            theirs != played[LearnedController.name] for theirs in played.values()
        ):
            raise ValueError(f"the controllers did not all play the same {split} instances as {LearnedController.name}")
    return results


_RESULTS = TypeAdapter(Annotated[list[Result], AfterValidator(_comparable)])
