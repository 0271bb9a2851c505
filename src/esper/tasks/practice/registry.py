"""Practitioners' tasks and hosts by name, and what a task promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from esper.errors import TaskError
from esper.tasks.practice.examples import Splits
from esper.tasks.practice.hosts import HOSTS, HostKind
from esper.tasks.registry import lookup


@dataclass(frozen=True)
class DataAccess:
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

    def load(self, access: DataAccess) -> Splits:
        """The data, split.

        Raises:
            TaskError: they are nowhere to be found, or damaged; it names the places and the command that helps.
        """
        ...


# By address, so that only those who ask wait for the libraries behind them to be imported.
TASKS: Mapping[str, str] = {
    "digits": "esper.tasks.practice.images:Digits",
    "mnist1d": "esper.tasks.practice.images:Mnist1d",
    "fashion-mnist": "esper.tasks.practice.images:FashionMnist",
    "cifar10": "esper.tasks.practice.images:Cifar10",
    "charlm": "esper.tasks.practice.text:CharLm",
}


@cache
def get_task(name: str) -> Task:
    """The task of that name; raises TaskError with near names if there is none."""
    task: type[Task] = resolve_name(lookup("task", name, TASKS))
    return task()


def get_host(name: str) -> HostKind:
    """The kind of host of that name; raises TaskError with near names if there is none."""
    return lookup("host", name, HOSTS)


def host_for(task: str, host: str | None) -> str:
    """The name of a host that suits the task, by default its first.

    Raises:
        TaskError: there is no such task or host, or they do not suit each other.
    """
    suitable = get_task(task).hosts
    if host is None:
        return suitable[0]
    get_host(host)
    if host not in suitable:
        raise TaskError(f"host '{host}' cannot read task '{task}': choose from {', '.join(suitable)}")
    return host
