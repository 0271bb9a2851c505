"""All suites by name: those of Esper, and those that you register."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeVar, get_args

from esper.errors import TaskError, did_you_mean
from esper.tasks.suite import Objective, Suite
from esper.tasks.suite_files import FILES, allowed_files, split_name

_LONGEST_NUMBER = 9
"""Digits of a number that draws a suite."""
Value = TypeVar("Value")
_Kind = TypeVar("_Kind", bound=Suite)


def lookup(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """``table[name]``; raises TaskError that names near matches, or every choice if nothing is near."""
    if name in table:
        return table[name]
    hint = did_you_mean(name, table) or f"; choose from {', '.join(table)}"
    raise TaskError(f"no {kind} is called {name!r}{hint}")


# By address, so that only those who ask for a suite wait for the libraries behind it to be imported.
_suites: dict[str, str | type[Suite]] = {
    "tokens": "esper.tasks.token_suite:TokenSuite",
    "digits": "esper.tasks.datasets:DigitsSuite",
    "mnist1d": "esper.tasks.datasets:Mnist1dSuite",
    "mnist1d_conv": "esper.tasks.datasets:Mnist1dConvSuite",
}


GENERATED = "generated"
"""Suites that a number draws, as in ``generated:7``."""
SHORTEST = 12
"""Decisions of the shortest generated suite."""
FIRST_UNSEEN = 10**6
"""Number of the first generated suite that no training draws."""

_registered_by: dict[str, set[str]] = {}
"""Names of suites by the file that registered them."""


def register(kind: type[_Kind]) -> type[_Kind]:
    """Class decorator that makes a suite known by its ``name``, wherever suites are named.

    Other processes know it if its module is imported there as well: a script's own is; a file's, if it is named in the
    environment variable `ESPER_SUITES`, or as ``FILE.py:NAME`` on the command line.

    Raises:
        TaskError: another suite has that name.
    """
    if kind.name in _suites or kind.name == GENERATED:
        holder = _suites.get(kind.name, "esper.tasks.generated_suite")
        taken = holder if isinstance(holder, str) else f"{holder.__module__}:{holder.__qualname__}"
        raise TaskError(f"suite name {kind.name!r} of {kind.__qualname__} is taken by {taken}: choose another")
    _suites[kind.name] = kind
    return kind


def suite_names() -> tuple[str, ...]:
    """Names of all suites, the default first."""
    _run_files()
    return tuple(_suites)


def get_suite(name: str) -> Suite:
    """The suite of that name, such as ``tokens`` or ``generated:7``, or ``FILE.py:NAME`` of a file that may be run.

    Raises:
        TaskError: there is none, with near names; it cannot be made; or the file may not be run, or fails.
    """
    file, own = split_name(name)
    if file is not None:
        _require_allowed(name, file)
    series, _, number = own.partition(":")
    if file is None and series == GENERATED:
        return _generate(number)
    _run_files()
    names = tuple(_suites) if file is None else tuple(_registered_by[file])
    if own not in names:
        choices = did_you_mean(own, names) or (f"; choose from {', '.join(names)}" if names else "")
        where = f"; or name the file that registers it: {FILES}=FILE.py" if file is None else f", in {file}"
        raise TaskError(f"no suite is called {own!r}{choices}{where}")
    return _make(_suites[own])


def _require_allowed(name: str, file: str) -> None:
    if os.pathsep in file:
        raise TaskError(f"suite {name!r}: a path with {os.pathsep!r} cannot stand in {FILES}: move the file elsewhere")
    if file not in allowed_files():
        raise TaskError(
            f"suite {name!r} is code in a file, which is only run where you name it yourself: on the command line, or "
            f"by {FILES}={file}"
        )


@cache
def _make(kind: str | type[Suite]) -> Suite:
    suite_class: type[Suite] = resolve_name(kind) if isinstance(kind, str) else kind
    try:
        suite = suite_class()
    except Exception as error:  # of an abstract class it says what is missing
        raise TaskError(f"suite {suite_class.name!r} cannot be made: {type(error).__name__}: {error}") from error
    lacking = [one for one in Suite.__annotations__ if one not in dir(suite)]
    if lacking:
        raise TaskError(
            f"suite {suite_class.name!r} does not say its {', '.join(lacking)}: esper.tasks.suite.Suite explains"
        )
    if suite.objective not in get_args(Objective):
        raise TaskError(
            f"suite {suite_class.name!r} has the objective {suite.objective!r}: {' or '.join(get_args(Objective))}"
        )
    return suite


@cache
def _generate(number: str) -> Suite:
    if not number.isascii() or not number.isdigit() or len(number) > _LONGEST_NUMBER:
        raise TaskError(f"suite {GENERATED!r} is many: a whole number from 0 says which, as in {GENERATED}:7")
    return resolve_name("esper.tasks.generated_suite:GeneratedSuite")(int(number))


def _run_files() -> None:
    for path in allowed_files():
        _run_file(path)


@cache
def _run_file(path: str) -> None:
    """Once in a process; what lies beside it can be imported, as in a script.

    Raises:
        TaskError: it cannot be read, or fails.
    """
    if not Path(path).is_file():
        raise TaskError(
            f"nothing can be registered from {path}: there is no such file; {FILES} or the command names it"
        )
    name, before = f"esper_suites_{len(_registered_by)}_{Path(path).stem}", dict(_suites)
    spec = spec_from_file_location(name, path)
    assert spec is not None  # a path that ends in .py has one
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _suites.clear()
        _suites.update(before)
        raise TaskError(f"{path} cannot be run for what it registers: {type(error).__name__}: {error}") from error
    _registered_by[path] = set(_suites) - set(before)
