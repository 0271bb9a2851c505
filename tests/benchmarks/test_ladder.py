"""The experiments on ladders: the page has the tables that the stored results give."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "ladder"
STORES = {
    "width 16": (RESULTS, "help", 16),
    "another text": (RESULTS, "asyncio", 16),
    "width 64": (RESULTS / "width-64", "help", 64),
    "twice the steps": (RESULTS / "steps-9600", "help", 16),
}


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def ladder(benchmarks: Any) -> ModuleType:
    return benchmarks("ladder")


def require_on_the_page(lines: list[str], page_name: str = "ladder.md") -> None:
    page = (ROOT / "docs" / page_name).read_text().splitlines()
    assert len(lines) > 3
    assert [line for line in lines if line not in page] == []


@pytest.mark.parametrize("name", STORES)
def test_the_page_has_the_tables_that_the_results_give(ladder: ModuleType, name: str) -> None:
    folder, text, width = STORES[name]
    store = ladder.Store(folder, text, width=width)
    require_on_the_page(ladder.tabulate(store))
    ways = {("climb", share) for share in ladder.SHARES}
    if name == "width 16":
        require_on_the_page(ladder.tabulate_rivals(store))
        ways |= {(way, share) for way in ("joint", "star") for share in ladder.SHARES}
        ways.add(("distil", ladder.ALL_SHARES))
    assert ways <= set(ladder.list_ways(store))


@pytest.mark.parametrize("name", ["width 16", "width 64", "twice the steps"])
def test_the_rates_chosen_are_no_ends_of_the_range(ladder: ModuleType, name: str) -> None:
    """Networks alone and those with exits are trained at the best rate, and not at the highest that was tried."""
    folder, text, width = STORES[name]
    store = ladder.Store(folder, text, width=width)
    chosen = [("alone", depth, store.best("alone", depth)) for depth in ladder.DEPTHS]
    if name == "width 16":
        chosen += [("joint", 8, store.best("joint", 8, share)) for share in ladder.SHARES]
    for way, depth, (rate, *others) in chosen:
        rates = {
            one.setting[0]
            for one in store.choices
            if (one.way, one.depth, one.setting[1:]) == (way, depth, tuple(others))
        }
        assert min(rates) < rate < max(rates)


def test_the_rivals_cost_what_the_ladder_costs(ladder: ModuleType) -> None:
    """Joint exits as a whole, and a star with the first rung of the ladder."""
    store = ladder.Store(RESULTS)
    for share in ladder.SHARES:
        (climbed, *_) = store.of("climb", ladder.DEPTHS[-1], share)
        (joint, *_) = store.of("joint", ladder.DEPTHS[-1], share)
        assert joint.flops == pytest.approx(climbed.flops, rel=1e-3)
        (first, *_) = store.of("climb", ladder.DEPTHS[0], share)
        star = sum(store.of("star", depth, share)[0].flops for depth in ladder.DEPTHS[1:])
        assert first.flops + star == pytest.approx(climbed.flops, rel=1e-2)


def test_the_page_has_the_table_of_vision_transformers_whose_rates_are_no_ends_of_the_range(benchmarks: Any) -> None:
    vit, families = benchmarks("ladder_vit"), benchmarks("families")
    results = families.Results(RESULTS / "vit-digits.jsonl")
    require_on_the_page(vit.tabulate(results, "digits"))
    best, rate = vit.choose_rates(results, "digits")
    assert all(min(vit.RATES) < one < max(vit.RATES) for one in (*best.values(), rate))


def test_the_page_has_the_tables_of_recipes(benchmarks: Any) -> None:
    recipes, families = benchmarks("ladder_recipes"), benchmarks("families")
    results = families.Results(RESULTS / "recipes-2400.jsonl")
    trained = len(recipes.RECIPES) * len(recipes.SEEDS) * len(recipes.DEPTHS)
    assert len(results.results) == 2 * trained  # alone, and by ladders
    for tabulate in (recipes.tabulate, recipes.tabulate_bias):
        require_on_the_page(tabulate(results, list(recipes.RECIPES)), "measured/ladder-recipes.md")


def test_the_page_has_the_seconds_that_were_measured(ladder: ModuleType) -> None:
    require_on_the_page(ladder.tabulate_time(json.loads((RESULTS / "time.json").read_text())["seconds"]))
