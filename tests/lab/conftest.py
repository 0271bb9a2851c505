"""Runs of tests here are of the short suite."""

from collections.abc import Iterator

import pytest

from train.runs import short_suite


@pytest.fixture(scope="module", autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield
