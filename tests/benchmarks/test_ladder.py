"""The experiments on ladders: the page has the figures measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.landing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "ladder"


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("ladder")


def test_the_page_has_the_tables_that_the_results_give(ladder: ModuleType) -> None:
    page = (ROOT / "docs" / "ladder.md").read_text().splitlines()
    store = ladder.Store(RESULTS)
    for depth in ladder.DEPTHS:
        for way, setting in (("alone", None), ("climb", (0.2,)), ("climb", (0.5,))):
            assert [one.seed for one in store.of(way, depth, setting)] == list(ladder.FINAL_SEEDS)
    for lines in (ladder.tabulate(store), ladder.tabulate_shares(store)):
        assert len(lines) > 3
        assert [line for line in lines if line not in page] == []


def test_the_rates_chosen_are_no_ends_of_the_range(ladder: ModuleType) -> None:
    """Networks alone are trained at the best rate, and not at the highest that was tried."""
    store = ladder.Store(RESULTS)
    for depth in ladder.DEPTHS:
        (rate,) = store.best("alone", depth)
        assert min(ladder.RATES) < rate < max(ladder.RATES)
