"""All practitioners' tasks and hosts by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name

from esper.errors import TaskError
from esper.tasks.lookup import lookup
from esper.tasks.practice.hosts.kind import HostKind
from esper.tasks.practice.task import Task

# By address, so that only those who ask wait for the libraries behind them to be imported.
_TASKS: Mapping[str, str] = {
    "digits": "esper.tasks.practice.data.digits:Digits",
    "mnist1d": "esper.tasks.practice.data.mnist1d:Mnist1d",
    "fashion-mnist": "esper.tasks.practice.data.fashion_mnist:FashionMnist",
    "cifar10": "esper.tasks.practice.data.cifar10:Cifar10",
    "charlm": "esper.tasks.practice.data.charlm:CharLm",
}
_HOSTS: Mapping[str, str] = {
    "mlp": "esper.tasks.practice.hosts.mlp:MLP",
    "conv": "esper.tasks.practice.hosts.conv:CONV",
    "resnet": "esper.tasks.practice.hosts.resnet:RESNET",
    "vit": "esper.tasks.practice.hosts.vit:VIT",
    "conv1d": "esper.tasks.practice.hosts.conv1d:CONV1D",
    "gpt": "esper.tasks.practice.hosts.gpt:GPT",
}


def task_names() -> tuple[str, ...]:
    """Names of all tasks."""
    return tuple(_TASKS)


def host_names() -> tuple[str, ...]:
    """Names of all hosts."""
    return tuple(_HOSTS)


@cache
def get_task(name: str) -> Task:
    """The task of that name; raises TaskError with near names if there is none."""
    task: type[Task] = resolve_name(lookup("task", name, _TASKS))
    return task()


def get_host(name: str) -> HostKind:
    """The kind of host of that name; raises TaskError with near names if there is none."""
    return resolve_name(lookup("host", name, _HOSTS))


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
