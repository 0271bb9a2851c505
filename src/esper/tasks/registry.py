"""All suites by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from typing import TypeVar

from esper.errors import TaskError, did_you_mean
from esper.tasks.suite import Suite

Value = TypeVar("Value")


def lookup(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """``table[name]``; raises TaskError that names near matches, or every choice if nothing is near."""
    if name in table:
        return table[name]
    hint = did_you_mean(name, table) or f"; choose from {', '.join(table)}"
    raise TaskError(f"no {kind} is called {name!r}{hint}")


# By address, so that only those who ask for a suite wait for the libraries behind it to be imported.
_SUITES: Mapping[str, str] = {
    "tokens": "esper.tasks.token_suite:TokenSuite",
    "digits": "esper.tasks.dataset_suites:DigitsSuite",
    "mnist1d": "esper.tasks.dataset_suites:Mnist1dSuite",
    "mnist1d_conv": "esper.tasks.dataset_suites:Mnist1dConvSuite",
}


def suite_names() -> tuple[str, ...]:
    """Names of all suites, the default first."""
    return tuple(_SUITES)


@cache
def get_suite(name: str) -> Suite:
    """The suite of that name; raises TaskError with near names if there is none."""
    suite: type[Suite] = resolve_name(lookup("suite", name, _SUITES))
    return suite()
