"""All suites by name: built-in suites, generated suites, and suites that users register."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeVar, get_args

from esper.errors import TaskError, did_you_mean
from esper.tasks.suite import Objective, Suite
from esper.tasks.suite_files import FILES, import_file, list_allowed_files, split_name

_LONGEST_NUMBER = 9
"""Largest number of digits in the number of a generated suite."""
_COUNTS = ("classes", "steps", "batches_per_step", "batch_size", "validation_size", "test_size")
"""Attributes of suites that must be integers of at least 1."""
_Kind = TypeVar("_Kind", bound=Suite)


# Built-in suites are stored as import paths, so that their libraries are imported only when a suite is used.
_suites: dict[str, str | type[Suite]] = {
    "tokens": "esper.tasks.token_suite:TokenSuite",
    "digits": "esper.tasks.datasets:DigitsSuite",
    "mnist1d": "esper.tasks.datasets:Mnist1dSuite",
    "mnist1d_conv": "esper.tasks.datasets:Mnist1dConvSuite",
    "images": "esper.tasks.image_suite:ImageSuite",
    "language": "esper.tasks.language_suite:LanguageSuite",
}
FILE_SUITES: Mapping[str, str] = {
    "fashion_mnist": "esper.tasks.image_files:FashionMnistSuite",
    "cifar10": "esper.tasks.image_files:Cifar10Suite",
}
"""Suites whose data are files that not every machine has; they are not listed."""

GENERATED = "generated"
"""Prefix of the names of generated suites, as in ``generated:7``."""
SHORTEST = 12
"""Smallest number of decisions in an episode of a generated suite."""
FIRST_UNSEEN = 10**6
"""Training never draws generated suites with this number or above."""

_registered_by: dict[str, set[str]] = {}
"""Names of suites by the file that registered them."""


def register(kind: type[_Kind]) -> type[_Kind]:
    """Class decorator: register a suite under its ``name``; raises TaskError if another suite has it.

    Worker processes import the suite's module, too, if it is the main script, in a file listed in `ESPER_SUITES`, or
    given as ``FILE.py:NAME`` on the command line.
    """
    taken = {**_suites, **FILE_SUITES, GENERATED: "esper.tasks.generated_suite"}
    if kind.name in taken:
        owner = taken[kind.name]
        address = owner if isinstance(owner, str) else f"{owner.__module__}:{owner.__qualname__}"
        raise TaskError(f"suite name {kind.name!r} of {kind.__qualname__} is taken by {address}: choose another")
    _suites[kind.name] = kind
    return kind


def suite_names() -> tuple[str, ...]:
    """Names of all suites whose data every machine has, the default suite first."""
    for path in list_allowed_files():
        _run_file(path)
    return tuple(_suites)


def get_suite(name: str) -> Suite:
    """The suite called ``name``: ``tokens``, ``generated:7`` or, from a file that may be run, ``FILE.py:NAME``.

    Raises:
        TaskError: no suite has that name, it cannot be constructed, or its file may not be run or fails.
    """
    file, suite_name = split_name(name)

    # A file is code, so the user must have named it on this machine.
    if file is not None and os.pathsep in file:
        raise TaskError(f"suite {name!r}: a path with {os.pathsep!r} cannot stand in {FILES}: move the file elsewhere")
    if file is not None and file not in list_allowed_files():
        raise TaskError(
            f"suite {name!r} is code in a file, which is only run where you name it yourself: on the command line, or "
            f"by {FILES}={file}"
        )

    series, _, number = suite_name.partition(":")
    if file is None and series == GENERATED:
        return _generate_suite(number)
    names = (*suite_names(), *FILE_SUITES)  # runs the files
    if file is not None:
        names = tuple(_registered_by[file])
    if suite_name not in names:
        choices = did_you_mean(suite_name, names) or (f"; choose from {', '.join(names)}" if names else "")
        where = f"; or name the file that registers it: {FILES}=FILE.py" if file is None else f", in {file}"
        raise TaskError(f"no suite is called {suite_name!r}{choices}{where}")
    return _make_suite({**_suites, **FILE_SUITES}[suite_name])


@cache
def _make_suite(kind: str | type[Suite]) -> Suite:
    suite_class: type[Suite] = resolve_name(kind) if isinstance(kind, str) else kind
    try:
        suite = suite_class()
    except TaskError:  # the suite's own explanation
        raise
    except Exception as error:  # for an abstract class, the message names the missing methods
        raise TaskError(f"suite {suite_class.name!r} cannot be made: {type(error).__name__}: {error}") from error
    # Every attribute without a default must be defined.
    missing = [attribute for attribute in Suite.__annotations__ if attribute not in dir(suite)]
    if missing:
        raise TaskError(f"suite {suite_class.name!r} does not define {', '.join(missing)}: see esper.tasks.suite.Suite")
    for attribute in _COUNTS:
        count: object = getattr(suite, attribute)
        if type(count) is not int or count < 1:
            raise TaskError(
                f"suite {suite_class.name!r} has {attribute} = {count!r}: give a whole number of at least 1"
            )
    if suite.objective not in get_args(Objective):
        raise TaskError(
            f"suite {suite_class.name!r} has the objective {suite.objective!r}: {' or '.join(get_args(Objective))}"
        )
    return suite


@cache
def _generate_suite(number: str) -> Suite:
    if not number.isascii() or not number.isdigit() or len(number) > _LONGEST_NUMBER:
        raise TaskError(f"suite {GENERATED!r} is a series: give a whole number from 0, as in {GENERATED}:7")
    return resolve_name("esper.tasks.generated_suite:GeneratedSuite")(int(number))


@cache
def _run_file(path: str) -> None:
    """Run a file that registers suites, once per process."""
    if not Path(path).is_file():
        raise TaskError(f"file {path}, named by the command or {FILES}, does not exist: name another file")
    before = dict(_suites)
    try:
        import_file(path)
    except (Exception, SystemExit) as error:
        # Forget the suites of a file that failed halfway.
        _suites.clear()
        _suites.update(before)
        raise TaskError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    _registered_by[path] = set(_suites) - set(before)
