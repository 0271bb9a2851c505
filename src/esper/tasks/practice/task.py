"""What a task promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from esper.tasks.practice.examples import Splits


@dataclass(frozen=True)
class Access:
    """How data may be got."""

    download: bool = False
    """Whether to fetch what is missing."""
    text: Path | None = None
    """The file that a language model learns; None: the task's own choice."""


class Task(Protocol):
    """A data set with the hosts that suit it."""

    name: str
    hosts: tuple[str, ...]
    """Names, the first one by default."""
    reads_text: bool
    """Whether it learns any text that it is given."""

    def load(self, access: Access) -> Splits:
        """The data, split.

        Raises:
            TaskError: they are nowhere to be found, or damaged; it names the places and the command that helps.
        """
        ...
