"""The cohorts that an evaluation has finished, kept so that one that was killed need not play them again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from esper.errors import RunError
from esper.experiments.earnings import Earnings
from esper.experiments.play import Played, PlayTask, Record, play_cohort
from esper.experiments.tally_json import tally_from_json, tally_to_json
from esper.experiments.workers import Workers
from esper.files import write_atomically
from esper.tasks.registry import get_suite

_EARNINGS = TypeAdapter(list[Earnings])


class EvaluationProgress:
    """A folder with a file per finished cohort, named by all that its result follows from."""

    def __init__(self, folder: Path, circumstances: Mapping[str, Any], tasks: Sequence[PlayTask]) -> None:
        """Take over what was played of ``tasks`` under these circumstances; everything else in the folder is removed.

        Raises:
            RunError: the folder cannot be used.
        """
        self._folder = folder
        self._circumstances = dict(circumstances)
        paths = {self._path(task): task for task in tasks}
        self._known = {path: played for path, task in paths.items() if (played := _read(path, task)) is not None}
        try:
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                if path not in self._known:
                    path.unlink()
        except OSError as error:
            raise RunError(f"cannot use {folder} ({error.strerror}): delete it and try again") from error

    @property
    def taken_over(self) -> int:
        """How many cohorts need not be played."""
        return len(self._known)

    def play(self, workers: Workers, tasks: Sequence[PlayTask]) -> list[list[Played]]:
        """Play what is not known yet, and keep each cohort as soon as it is."""
        paths = [self._path(task) for task in tasks]
        missing = [index for index, path in enumerate(paths) if path not in self._known]
        for place, played in workers.finished(play_cohort, [tasks[index] for index in missing]):
            path = paths[missing[place]]
            _write(path, played)
            self._known[path] = played
        return [self._known[path] for path in paths]

    def remove(self) -> None:
        """Forget it all: the evaluation has its results."""
        try:
            shutil.rmtree(self._folder)
        except OSError as error:
            raise RunError(f"cannot delete {self._folder} ({error.strerror}): delete it by hand") from error

    def _path(self, task: PlayTask) -> Path:
        parts = [[part.controller.name, [one.to_json() for one in part.instances]] for part in task.parts]
        return self._folder / f"{_digest([self._circumstances, parts, task.attributed])}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write(path: Path, played: Sequence[Played]) -> None:
    content = [
        {
            "records": [asdict(one) for one in part.records],
            "tallies": [tally_to_json(one) for one in part.tallies],
            "earnings": [asdict(one) for one in part.earnings],
        }
        for part in played
    ]
    write_atomically(path, json.dumps({"sha256": _digest(content), "played": content}))


def _read(path: Path, task: PlayTask) -> list[Played] | None:
    """What :func:`_write` wrote; None if it is missing or damaged."""
    suite = get_suite(task.terms.suite)
    try:
        file = json.loads(path.read_bytes())
        if file["sha256"] != _digest(file["played"]):
            return None
        return [
            Played(
                [Record(**record) for record in one["records"]],
                [tally_from_json(tally, suite, part.instances) for tally in one["tallies"]],
                _EARNINGS.validate_python(one["earnings"]),
            )
            for part, one in zip(task.parts, file["played"], strict=True)
        ]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
