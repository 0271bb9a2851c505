"""Options that several commands share, and how a command's options become arguments of its function."""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from annotated_types import Interval
from rich.console import Console

from esper.config.settings import MOST_AT_ONCE
from esper.dash.output import ProgressReporter, print_line, report_progress
from esper.errors import ConfigError
from esper.signals import Terminated

if TYPE_CHECKING:  # takes seconds
    from esper.train.workers import Workers

RUNS = Path("runs")
"""Where runs go by default."""

Seed = Annotated[int, Interval(ge=0, le=2**31 - 1)]
Instances = Annotated[int, Interval(ge=0, le=MOST_AT_ONCE)]
"""A number of instances, which are all made before the first is played."""

Overrides = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(name="set", metavar="KEY=VALUE", help="Override one setting; repeatable."),
]
"""Repeatable changes of settings: `overrides: Overrides = ()`."""


@contextmanager
def report_work(console: Console, phase: str, pool: "Workers") -> "Generator[Workers]":
    """Workers whose finished tasks are the progress of the phase."""
    with pool as workers, report_progress(console, phase) as progress, workers.report_to(progress.update):
        yield workers


@contextmanager
def hint_if_stopped(console: Console, hint: str) -> Generator[None]:
    """Print how to go on if Ctrl-C or SIGTERM stops the command."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        print_line(console, hint)
        raise


def run_command(target: Callable[..., int | None], name: str, arguments: Sequence[str], ends: bool) -> int | None:
    """Call the function of the command ``name`` with the options in ``arguments``; returns its exit code."""
    # The help adds neither "(default: None)" nor "(default: )" to options.
    hints = get_type_hints(target, include_extras=True)
    for option, parameter in inspect.signature(target).parameters.items():
        hint = hints[option]
        # An argument without a default that takes any number of values may be left out, too.
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if parameter.default is None or (parameter.default is parameter.empty and get_origin(kind) is tuple):
            hints[option] = Annotated[hint, tyro.conf.arg(help_behavior_hint="")]
    target.__annotations__ = hints

    @wraps(target)
    def call(**options: Any) -> int | None:
        for option, value in options.items():
            interval = find_interval(hints[option])
            if interval is not None and value is not None and not interval.ge <= value <= interval.le:
                raise ConfigError(f"--{option.replace('_', '-')} {value}: give {interval.ge} to {interval.le}")
        return target(**options)

    # No command is silent for long: its phases say what it does, and how much of it is done.
    with ProgressReporter(Console(stderr=True), name) if ends else nullcontext():
        config = (tyro.conf.DisallowNone,)  # the help shows PATH, not {None}|PATH
        return tyro.cli(call, prog=name, args=arguments, config=config)


def find_interval(hint: Any) -> Any:
    """The `Interval` in the type hint of an option, also of one that may be left out."""
    if isinstance(hint, Interval):
        return hint
    parts = (*getattr(hint, "__metadata__", ()), *get_args(hint))
    return next((interval for part in parts if (interval := find_interval(part)) is not None), None)
