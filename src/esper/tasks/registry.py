"""All suites by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name

from esper.tasks.lookup import lookup
from esper.tasks.suite import Suite

# By address, so that only those who ask for a suite wait for the libraries behind it to be imported.
_SUITES: Mapping[str, str] = {
    "tokens": "esper.tasks.tokens.suite:TokenSuite",
    "digits": "esper.tasks.datasets.suites:DigitsSuite",
    "mnist1d": "esper.tasks.datasets.suites:Mnist1dSuite",
    "mnist1d_conv": "esper.tasks.datasets.suites:Mnist1dConvSuite",
}


def suite_names() -> tuple[str, ...]:
    """Names of all suites, the default first."""
    return tuple(_SUITES)


@cache
def get_suite(name: str) -> Suite:
    """The suite of that name; raises TaskError with near names if there is none."""
    suite: type[Suite] = resolve_name(lookup("suite", name, _SUITES))
    return suite()
