"""Runs of tests here are of the short suite."""

from collections.abc import Iterator

import pytest

from train.runs import Launcher, launcher, short_suite


@pytest.fixture(scope="module", autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with launcher(tmp_path_factory.mktemp("launcher")) as running:
        yield running
