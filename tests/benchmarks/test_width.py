"""The experiments on growth in width: the page has the figures measured, and what is compared is alike."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import esper
from benchmarks.result_files import ResultFile
from esper.control.rules import LookRule
from esper.grower.controllers import choose_controller
from esper.grower.network import ModelSpec
from esper.growth.blueprints import get

pytestmark = pytest.mark.landing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "width"


@pytest.fixture
def mlps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("width_mlp")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("width_tables")


@pytest.fixture
def gpts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("ffn_width")


def load_digits() -> Any:
    return importlib.import_module("zoo.data").load("digits")


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.jsonl")))
def test_the_page_has_the_tables_that_the_results_give(
    mlps: ModuleType, tables: ModuleType, gpts: ModuleType, name: str
) -> None:
    path, allocations = RESULTS / f"{name}.jsonl", importlib.import_module("allocations")
    arms = ResultFile(RESULTS / "mlp_arms.jsonl", mlps.Result).results
    makers: dict[str, Callable[[], list[list[str]]]] = {
        "mlp_arms": lambda: [tables.tabulate_arms(arms), tables.tabulate_kinds(arms), tables.tabulate_looks(arms)],
        "mlp_scores": lambda: [tables.tabulate_scores(ResultFile(path, tables.Score).results)],
        "mlp_search": lambda: [tables.tabulate_search(ResultFile(path, tables.Search).results, arms)],
        "ffn": lambda: [gpts.tabulate(gpts.Store(path))],
        "allocations": lambda: [allocations.tabulate(ResultFile(path, allocations.Result).results)],
    }
    pages = [(ROOT / "docs" / page).read_text() for page in ("practice.md", "measured/width.md")]
    page = "\n".join(pages).splitlines()
    for lines in makers[name]():
        assert len(lines) > 2
        assert [line for line in lines if line not in page] == []


def test_the_summary_has_their_figures(mlps: ModuleType, tables: ModuleType) -> None:
    arms = ResultFile(RESULTS / "mlp_arms.jsonl", mlps.Result).results
    searches = ResultFile(RESULTS / "mlp_search.jsonl", tables.Search).results
    page = (ROOT / "docs" / "practice.md").read_text().splitlines()
    rows = {
        "bare (562 and 754 parameters)": (mlps.BARE, ""),
        "growth by looking (2,143 and 2,668)": (mlps.BOTH, ""),
        "its final shape from scratch": (mlps.STATIC, mlps.BOTH),
        "three equal layers from scratch": (mlps.UNIFORM, mlps.BOTH),
        "gromo": (mlps.GROMO, mlps.BOTH),
    }
    for label, (how, like) in rows.items():
        cells = list[str]()
        for task in mlps.TASKS:
            right = [100 * one.accuracy for one in tables.select(arms, mlps.Arm(task, how, 0, like))]
            assert len(right) == 5
            cells.append(f"{np.mean(right):.1f} ± {tables.deviate(right):.1f}")
        assert f"| {label} | {' | '.join(cells)} |" in page
    means = [line.split(" | ")[1].split(" ± ")[0] for line in tables.tabulate_search(searches, arms) if "times" in line]
    searched = f"| {', '.join(means[:3])} | {', '.join(means[3:])} |"
    assert f"| a search over widths and modules at 1, 4, 16 times the FLOPs {searched}" in page


def test_the_final_shape_from_scratch_is_as_large_as_what_grew(mlps: ModuleType) -> None:
    splits = load_digits()
    model = esper.attach(mlps.make_host(splits, 0), mlps.OFFERS[mlps.BOTH], mlps.flat(splits.train.inputs[:2]))
    grown = (("1", "input_skip"), ("2", "units_8"), ("3", "norm"), ("6", "units_4"))
    for slot, blueprint in grown:
        model.slots[slot].germinate(blueprint, alpha=1.0)
        model.slots[slot].fossilize()
    shape = mlps.make_final_shape(grown, splits, 0)
    assert mlps.count(shape) == mlps.count(model.finalize())
    # Its wider layers are as torch draws them, while units that grow begin with a last layer of zeros.
    assert all((part.weight != 0).all() for part in shape if isinstance(part, nn.Linear))


@pytest.mark.parametrize("how", ["IN_TURN", "THEN_BETTER"])
def test_a_rule_of_one_kind_each_offers_the_other_kind_after_the_first(mlps: ModuleType, how: str) -> None:
    splits = load_digits()
    model = esper.attach(mlps.make_host(splits, 0), mlps.OFFERS[mlps.BOTH], mlps.flat(splits.train.inputs[:2]))
    optimizer = mlps.make_optimizer(model.parameter_groups(lr=mlps.RATE))
    spec = ModelSpec(model, optimizer)
    rule = choose_controller(LookRule.name, spec, mlps.EPOCHS, None).controller
    controller = mlps.KindRule(rule, spec, list(model.slots), getattr(mlps, how))
    validate = esper.Validation("classification", [(mlps.flat(splits.validation.inputs), splits.validation.labels)])
    grower = esper.Grower(model, optimizer, validate, controller=controller, horizon=mlps.EPOCHS, classes=10)
    for epoch in range(6):
        grower.step(train_loss=mlps.train_epoch(model, optimizer, splits, 0, epoch))
    kinds = [slot in mlps.WIDTH_SLOTS for slot in model.seeds]
    if how == "THEN_BETTER":
        assert sorted(kinds) == [False, True], "no more before both were judged"
    else:
        assert abs(kinds.count(True) - kinds.count(False)) <= 1
        assert len(kinds) >= 3
    # What the rule was promised is recorded with what it would cost.
    (look,) = controller.looks
    for name, (_, _, parameters) in look.items():
        slot, blueprint = name.split()
        assert parameters == get(blueprint).parameters_at(model.slots[slot].site)


def test_the_best_of_a_search_is_chosen_on_validation_data_within_its_budget(tables: ModuleType) -> None:
    def trial(validation: float, spent: float) -> Any:
        return tables.Trial((4, 4, 4), ("", "", ""), validation, 1 - validation, 100, spent)

    search = tables.Search("digits", 0, (trial(0.5, 1.2), trial(0.8, 3.0), trial(0.9, 5.0), trial(0.7, 15.0)), 9)
    assert [tables.pick(search, multiple) for multiple in (1, 4, 16)] == [
        (search.trials[0], 1),  # one network is trained at least
        (search.trials[1], 2),
        (search.trials[2], 4),
    ]


def test_a_network_whose_new_units_were_merged_learns_on_as_before(gpts: ModuleType) -> None:
    """Also by the moments of its optimizer, which are merged alike."""
    torch.manual_seed(0)
    model = gpts.attach(gpts.build(20, 16), 16)
    optimizer = gpts.make_optimizer(model, 1e-2)
    tokens = torch.randint(20, (4, gpts.WINDOW))
    for slot in model.slots.values():
        slot.germinate("units_16", alpha=1.0)
        slot.fossilize()
    for _ in range(3):
        gpts.learn(model, optimizer, (tokens, tokens))
    wider, other = gpts.merge(model, optimizer, 32, 1e-2)
    for _ in range(2):
        gpts.learn(model, optimizer, (tokens, tokens))
        gpts.learn(wider, other, (tokens, tokens))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), wider(tokens), rtol=0, atol=1e-4)
    assert {slot.blueprints for slot in wider.slots.values()} == {("units_32",)}


def test_every_run_of_a_gpt_spends_the_same_and_ends_as_wide_as_planned(
    gpts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpts, "BUDGET", 5e8)
    plans = [gpts.Plan(32, (), 0.01, 0), gpts.Plan(16, (0.3,), 0.01, 0), gpts.Plan(8, (0.2, 0.4), 0.01, 0)]
    results = [gpts.train(plan) for plan in plans]
    assert {one.parameters for one in results} == {results[0].parameters}
    assert all(1 <= one.flops / gpts.BUDGET < 1.2 for one in results)
    assert np.argmin([one.steps for one in results]) == 0, "narrow networks take more steps for as many FLOPs"
