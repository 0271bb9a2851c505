"""The experiments on language models that grow deeper, made small: minutes, and the direction alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEEDS = (1, 2)


@pytest.fixture
def deepening(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("deepening")
    monkeypatch.setattr(module, "BUDGET", 1e11)
    return module


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("ladder")
    for name, value in {"STEPS": 400, "DEPTHS": (1, 2, 4), "FINAL_SEEDS": SEEDS, "RATES": (12e-3,)}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "SHARES", (0.5,))
    monkeypatch.setattr(module, "DISTILLING", ((12e-3, 0.5),))
    return module


@pytest.mark.slow
def test_copied_blocks_are_ahead_of_the_final_depth_from_the_start_and_of_random_ones(deepening: ModuleType) -> None:
    plans = {
        "from the start": {"depth": 8},
        "copied": {"depth": 4, "time": 0.3, "place": "all", "kind": "block_copy"},
        "random": {"depth": 4, "time": 0.3, "place": "all", "kind": "random"},
    }
    found = {
        name: [deepening.train(deepening.Plan(rate=12e-3, seed=seed, **plan)) for seed in SEEDS]
        for name, plan in plans.items()
    }
    assert {one.blocks for results in found.values() for one in results} == {8}
    for results in found.values():
        assert all(1 <= one.flops / deepening.BUDGET < 1.01 for one in results)
    losses = {name: np.mean([one.test for one in results]) for name, results in found.items()}
    assert losses["copied"] < losses["from the start"]
    assert losses["copied"] < losses["random"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["all_at_plateau", "look", "race"])
def test_what_rules_take_is_within_the_budget(deepening: ModuleType, rule: str) -> None:
    result = deepening.train(deepening.Plan(depth=2, rate=12e-3, seed=1, rule=rule))
    assert 1 <= result.flops / deepening.BUDGET < 1.05
    assert result.blocks == 4 if rule == "all_at_plateau" else 2 <= result.blocks <= 4


@pytest.mark.slow
def test_another_text_has_finalists_of_its_own_that_were_chosen_on_the_first(
    deepening: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "BUDGET": 2e9,
        "DEPTHS": (1, 2),
        "RATES": (12e-3,),
        "FIRST_DEPTH": 1,
        "FINAL_SEEDS": (1, 2),
        "TIMES": (0.3,),
    }
    for name, value in {**small, "PLACES": ("all",), "KINDS": ("block_copy",), "FINALISTS": 2}.items():
        monkeypatch.setattr(deepening, name, value)
    with pytest.raises(SystemExit, match="step fixed"):
        deepening.plan_final(deepening.Store(tmp_path / "deepening.jsonl"))
    store = deepening.Store(tmp_path / "deepening.jsonl")
    for step in ("fixed", "sweep", "final", "rules", "other"):
        for plan in store.missing(deepening.PLANS[step](store)):
            store.add(deepening.train(plan))
    deepening.main(tmp_path, "table")
    other = [one.plan for one in store.results if one.plan.text == "asyncio"]
    assert len(other) == 6
    assert {plan.seed for plan in other} == {1, 2}
    assert store.best_fixed() in store.rank("fixed")[:2]
    assert f"asyncio, depth 1 by {store.rank('rules')[0].rule}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_ladder_is_cheaper_than_its_sizes_alone_and_its_first_rung_is_the_same(
    ladder: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("alone", "climb", "distil"):
        ladder.main(tmp_path, step)
    assert "% less" in capsys.readouterr().out
    store = ladder.Store(tmp_path)
    alone, climbed = (
        {depth: store.of(way, depth, setting) for depth in ladder.DEPTHS}
        for way, setting in (("alone", (12e-3,)), ("climb", (0.5,)))
    )
    assert [one.test for one in climbed[1]] == pytest.approx([one.test for one in alone[1]])
    whole = sum(found[0].flops for found in alone.values())
    assert climbed[4][0].flops < 0.9 * whole
    distilled = alone[4][0].flops + sum(store.of("distil", depth)[0].flops for depth in (1, 2))
    assert distilled == pytest.approx(ladder.DISTILLED * whole, rel=0.02)
    for depth in (2, 4):
        assert np.mean([one.test for one in climbed[depth]]) < 1.05 * np.mean([one.test for one in alone[depth]])
