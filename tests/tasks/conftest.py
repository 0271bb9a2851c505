"""Every suite, and an instance of each of its problems."""

import numpy as np
import pytest

from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite import Suite

GENERATED = tuple(f"generated:{number}" for number in (0, 1, 2, 3, 10, 11))
"""One of each kind of host, and one in which only so much may grow."""

LARGE = ("images", "language")
"""Suites whose data and hosts take seconds."""
SUITES = [pytest.param(name, marks=pytest.mark.landing) if name in LARGE else name for name in suite_names()]


@pytest.fixture(params=(*SUITES, *GENERATED))
def suite(request: pytest.FixtureRequest) -> Suite:
    return get_suite(request.param)


@pytest.fixture
def instances(suite: Suite) -> list[Instance]:
    """An instance of every variant of every family, those for transfer included."""
    rng = np.random.default_rng(0)
    return [
        suite.draw(family, variant, seed, rng)
        for family in suite.families + suite.transfer_families
        for seed, variant in enumerate(suite.variants(family))
    ]
