"""The token suite with episodes so short that a test can afford many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from esper.tasks import registry
from esper.tasks.token_suite import TokenSuite


class ShortSuite(TokenSuite):
    name = "short"
    steps = 8
    batches_per_step = 1
    validation_size = 32
    test_size = 64


@contextmanager
def short_suite() -> Iterator[None]:
    """While active, suite ``short`` is registered by its name, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._suites, ShortSuite.name, ShortSuite)
        yield
