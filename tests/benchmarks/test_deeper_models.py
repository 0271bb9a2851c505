"""The experiments on language models that grow deeper, made small: minutes, and the direction alone."""

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
    monkeypatch.setattr(module, "JOINT", ((12e-3, 0.1),))
    return module


def test_the_page_has_what_was_measured_on_another_text(deepening: ModuleType) -> None:
    store = deepening.Store(BENCHMARKS / "results" / "deepening" / "deepening.jsonl")
    page = (BENCHMARKS.parent / "docs" / "measured" / "deeper.md").read_text()
    plans = {one.plan for one in store.results if one.plan.text == deepening.OTHER_TEXT and one.plan.seed == 1}
    assert len(plans) >= 4
    fixed = store.find(store.best_fixed(deepening.OTHER_TEXT))
    for plan in plans:
        found = store.find(plan)
        losses = [one.test for one in found.values()]
        assert [*sorted(found)] == list(deepening.FINAL_SEEDS)
        assert f"{np.mean(losses):.3f} ± .{1000 * np.std(losses, ddof=1):03.0f} |" in page
        assert not (compared := deepening.beside(found, fixed, "")) or describe(compared) in page


def describe(compared: str) -> str:
    """As the page has it, in tenths of a percent."""
    mean, error = (float(part.strip(" ,%").removesuffix("% beside")) for part in compared.split(" ± "))
    return f"{mean:+.1f}% ± {error:.1f}%".replace("0.", ".")


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
@pytest.mark.parametrize("rule", ["all_at_plateau", "look"])
def test_what_rules_take_is_within_the_budget(deepening: ModuleType, rule: str) -> None:
    result = deepening.train(deepening.Plan(depth=2, rate=12e-3, seed=1, rule=rule))
    assert result.flops / deepening.BUDGET < 1.05
    if rule != "look":  # which plants none in so short a training
        assert result.blocks == 4


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
    for step in ("fixed", "sweep", "final", "rules", "other"):
        deepening.main(tmp_path, step)
    store = deepening.Store(tmp_path / "deepening.jsonl")
    other = [one.plan for one in store.results if one.plan.text == "asyncio"]
    assert {plan.depth for plan in other if not plan.rule and plan.time is None} == {1, 2}
    assert len(other) == 8
    assert {plan.seed for plan in other} == {1, 2}
    means = {plan: np.mean([one.validation for one in store.find(plan).values()]) for plan in store.rank("fixed")}
    assert means[store.best_fixed()] == min(means.values())
    assert f"asyncio, depth 1 by {store.rank('rules')[0].rule}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_ladder_is_cheaper_than_its_sizes_alone_and_its_first_rung_is_the_same(
    ladder: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("alone", "climb", "joint", "star", "distil"):
        ladder.main(tmp_path, step)
    printed = capsys.readouterr().out
    assert "% less" in printed
    assert all(title in printed for title in ("joint exits", "star", "distilled"))
    store = ladder.Store(tmp_path)
    alone, climbed = ({depth: store.of(way, depth, 0.5) for depth in ladder.DEPTHS} for way in ("alone", "climb"))
    assert [one.test for one in climbed[1]] == pytest.approx([one.test for one in alone[1]])
    whole = sum(found[0].flops for found in alone.values())
    assert climbed[4][0].flops < 0.9 * whole
    assert store.of("joint", 4, 0.5)[0].flops == pytest.approx(climbed[4][0].flops, rel=0.01)
    star = climbed[1][0].flops + sum(store.of("star", depth, 0.5)[0].flops for depth in (2, 4))
    assert star == pytest.approx(climbed[4][0].flops)
    assert [one.test for one in store.of("star", 2, 0.5)] == [one.test for one in climbed[2]]  # the same training
    distilled = alone[4][0].flops + sum(store.of("distil", depth)[0].flops for depth in (1, 2))
    assert distilled == pytest.approx(ladder.DISTILLED * whole, rel=0.02)
    for depth in (2, 4):
        assert np.mean([one.test for one in climbed[depth]]) < 1.05 * np.mean([one.test for one in alone[depth]])
