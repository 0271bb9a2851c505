"""Results of an experiment as JSON lines, which several processes may fill: start a command once per core."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from esper.numerics.devices import describe_platform

R = TypeVar("R")
T = TypeVar("T")
PAUSE = 1.0
"""Seconds between two looks at what other processes have done."""


class ResultFile(Generic[R]):
    """Results of one kind, a dataclass, one JSON line each; beside them the software and devices that made them.

    Args:
        path: The file; its folder is made if need be.
        kind: Of the results.
        device: Computes them.
    """

    def __init__(self, path: Path, kind: type[R], device: str = "cpu") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._device = device
        self.path, self._adapter = path, TypeAdapter[R](kind)
        self._size, self._results = 0, list[R]()

    @property
    def results(self) -> list[R]:
        """All that is known by now, of other processes, too."""
        if self.path.exists() and self.path.stat().st_size != self._size:
            text = self.path.read_text()
            self._size = len(text.encode())
            self._results = [self._adapter.validate_json(line) for line in text.splitlines()]
        return self._results

    def add(self, *results: Any) -> None:
        """Append results, in one write."""
        platforms, platform = self.path.with_suffix(".platforms"), json.dumps(describe_platform([self._device]))
        if not platforms.exists() or platform not in platforms.read_text().splitlines():
            with platforms.open("a") as file:
                file.write(platform + "\n")
        with self.path.open("a") as file:
            file.write("".join(json.dumps(asdict(result)) + "\n" for result in results))

    def run_missing(self, tasks: Sequence[T], is_known: Callable[[T], bool], run: Callable[[T], None]) -> None:
        """Run the tasks whose results are not known, each in one process; returns when all are known.

        Args:
            tasks: Their `repr` says which they are.
            is_known: Whether a task has been done, by `results`.
            run: Does a task, and adds its results.
        """
        claims = self.path.with_suffix(".claims")
        claims.mkdir(exist_ok=True)
        while missing := [task for task in tasks if not is_known(task)]:
            waiting = True
            for task in missing:
                name = hashlib.sha256(repr(task).encode()).hexdigest()[:16]
                try:
                    # The lock goes with its process, so that what was killed is done again.
                    with FileLock(claims / f"{name}.lock", timeout=0):
                        if not is_known(task):
                            run(task)
                        waiting = False
                except Timeout:  # another process does it
                    continue
            if waiting:
                time.sleep(PAUSE)
