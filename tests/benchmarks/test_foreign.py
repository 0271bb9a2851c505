"""The benchmark of foreign models: every model can be grown, the halves are apart, and results are compared rightly."""

import importlib
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import esper
from esper.control.controller import SeedRater
from esper.control.rules import Never, rate_seeds
from esper.engine.observation import FeatureReader
from esper.errors import ConfigError
from esper.growth.promise import PromiseSettings
from esper.lifecycle.table import Figures, SeedRating

ROOT = Path(__file__).parents[2]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("foreign")


def make_result(foreign: ModuleType, arm: str, seed: int, value: float, **fields: Any) -> Any:
    names = {"problem": "convnet", "metric": "accuracy", "epochs": 10, "flops": 100.0, "added_parameters": 0}
    counts = {"loss": 1.0, "host_parameters": 50, "tried": 0, "kept": 0, "seconds": 1.0, "decisions": ()}
    return foreign.Result(**{**names, **counts, "arm": arm, "seed": seed, "value": value, **fields})


def test_every_model_attaches_and_trains(foreign: ModuleType) -> None:
    for name, problem in foreign.PROBLEMS.items():
        torch.manual_seed(0)
        splits = problem.data(0)
        model = esper.attach(problem.build(), problem.slots, splits.train.select(slice(2)).inputs)
        assert model.host_flops is not None, f"{name}: FLOPs cannot be counted"
        foreign.plant_largest(model, 0)
        optimizer = problem.recipe.make_optimizer(model.parameter_groups(lr=problem.recipe.learning_rate))
        before = [parameter.detach().clone() for parameter in model.host.parameters()]
        batches = splits.train.shuffle(problem.recipe.batch_size, torch.Generator().manual_seed(0))
        for _, batch in zip(range(2), batches, strict=False):
            optimizer.zero_grad()
            problem.loss(model(*batch.inputs), batch.targets).backward()
            optimizer.step()
        moved = [not torch.equal(old, new) for old, new in zip(before, model.host.parameters(), strict=True)]
        assert all(moved), name
        few = splits.validation.select(slice(8))
        evaluate = foreign.make_evaluation(problem, few)
        assert np.isfinite(evaluate(model)).all()
        assert evaluate(model) == evaluate(model)


def test_a_run_repeats_itself_and_is_read_when_it_is_there(foreign: ModuleType, tmp_path: Path) -> None:
    run = foreign.Run("mlp_breast_cancer", "look", seed=0, epochs=4)
    first = foreign.train_once(run, tmp_path)
    again = foreign.train(run)
    assert replace(first, seconds=0) == replace(again, seconds=0)

    # A kept result is read, whatever it says.
    path = run.locate(tmp_path)
    kept = {**asdict(first), "value": 0.125}
    path.write_text(json.dumps(kept))
    assert [one.value for one in foreign.do_runs([run], tmp_path, 1, foreign.Console())] == [0.125]


def test_the_bare_model_trains_longer_for_the_flops_of_the_rule(foreign: ModuleType) -> None:
    bare, rule = make_result(foreign, "bare", 0, 0.5), make_result(foreign, "look", 0, 0.5, flops=131.0)
    assert foreign.match_epochs(bare, bare) == 10
    assert foreign.match_epochs(bare, rule) == 14


class Onlooker:
    """Plants nothing, and remembers which candidates it was offered, and what each promised."""

    name, promise = "onlooker", None

    def __init__(self) -> None:
        self.offers: list[np.ndarray] = []
        self.promises: list[np.ndarray] = []

    def start(self, seeds: Sequence[int]) -> None:
        return None

    def rate_seeds(self, observation: Any) -> SeedRating[Figures]:
        return rate_seeds(FeatureReader(observation), margin=0.25)

    def act(self, observation: Any, masks: Any, state: None) -> Any:
        self.observation = observation
        self.offers.append(masks.blueprint)
        self.promises.append(FeatureReader(observation).blueprint("promise"))
        return Never().act(observation, masks, state)


def test_a_random_candidate_is_one_of_the_legal_ones_and_all_have_their_turn(foreign: ModuleType) -> None:
    problem = foreign.PROBLEMS["mlp_friedman"]
    splits = problem.data(0)
    torch.manual_seed(0)
    model = esper.attach(problem.build(), problem.slots, splits.train.select(slice(2)).inputs)
    optimizer = problem.recipe.make_optimizer(model.parameter_groups(lr=3e-3))
    rule = Onlooker()
    candidate = foreign.RandomCandidate(rule)
    candidate.promise = PromiseSettings(every=1, first=2)
    grower = esper.Grower(
        model, optimizer, foreign.make_evaluation(problem, splits.validation), controller=candidate, horizon=60
    )
    for epoch in range(40):
        for batch in splits.train.shuffle(250, torch.Generator().manual_seed(epoch)):
            loss = problem.loss(model(*batch.inputs), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        grower.step(train_loss=loss)
    offered = [(offer, promise) for offer, promise in zip(rule.offers, rule.promises, strict=True) if offer.any()]
    assert {int(offer.sum()) for offer, _ in offered} == {1}
    assert all(promise[offer] == promise.max() for offer, promise in offered)
    assert {int(offer.argmax()) for offer, _ in offered} == set(range(6)), "three blueprints in two slots"
    # Modules on probation are judged as the rule judges them.
    assert isinstance(candidate, SeedRater)
    assert (candidate.rate_seeds(rule.observation).threshold >= 0.25).all()


def test_gains_are_in_deviations_of_the_bare_model_and_losses_count_downwards(foreign: ModuleType) -> None:
    results = []
    for seed, value in enumerate((1.0, 2.0, 3.0)):
        results.append(make_result(foreign, "bare", seed, value, metric="loss"))
        results.append(make_result(foreign, "all_at_start", seed, value - 2, metric="loss", added_parameters=100))
        results.append(make_result(foreign, "look", seed, value - 1.5, metric="loss", added_parameters=25, flops=150.0))
    by_arm = {one.arm: one for one in foreign.compare(results)}
    assert by_arm["bare"].gain == 0
    assert by_arm["all_at_start"].gain == pytest.approx(2)
    assert by_arm["look"].gain == pytest.approx(1.5)
    assert by_arm["look"].error == pytest.approx(0)
    assert by_arm["look"].added == 0.5
    assert by_arm["look"].flops == 1.5

    # A second model, on which everything from the start loses, counts as a loss and not for the shares.
    worse = [
        replace(one, problem="vit", metric="accuracy", value=one.value if one.arm == "bare" else one.value - 3)
        for one in results
    ]
    everything, look = foreign.summarise(foreign.compare([*results, *worse]))
    assert (everything.wins, everything.losses, everything.models) == (1, 1, 2)
    assert look.gaining == 1
    assert look.share_of_gain == pytest.approx(0.75)
    assert look.share_of_parameters == pytest.approx(0.25)


def test_models_of_the_other_half_and_unknown_arms_are_refused(foreign: ModuleType, tmp_path: Path) -> None:
    for options, sentence in (
        ({"models": ("gpt",)}, "model 'gpt'"),
        ({"arms": ("lok",)}, "did you mean 'look'"),
        ({"arms": ("longer",)}, "add that arm"),
        ({"controller": "look"}, "FILE.py:NAME"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            foreign.main(tmp_path, **options)


def test_the_page_has_what_the_kept_runs_say(foreign: ModuleType) -> None:
    """The gain, its error and the added parameters of every model and arm in docs/practice.md, and their summary."""
    lines = (ROOT / "benchmarks/results/foreign/reporting.jsonl").read_text().splitlines()
    results = [foreign.Result(**json.loads(line), seconds=0.0, decisions=()) for line in lines]
    comparisons = foreign.compare(results)
    found = {(one.problem, one.arm): one for one in comparisons}
    arms = ("longer", "all_at_start", "random_candidate", "former_look", "look")
    page = (ROOT / "docs/practice.md").read_text()
    table = page.partition("## Models that nobody prepared")[2].partition("```")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]

    def read(text: str) -> list[float]:
        return [float(number) for number in re.findall(r"[+-]?(?:\d+\.?\d*|\.\d+)", text.replace(",", ""))]

    models = {row[0].strip("`"): row for row in rows if row[0].startswith("`")}
    assert set(models) == {one.problem for one in comparisons}
    assert len(lines) == len(models) * 5 * (1 + len(arms))
    for name, row in models.items():
        values = found[name, "bare"].values
        digits = 3 if statistics.mean(values) < 10 else 1
        assert read(row[1]) == [round(statistics.mean(values), digits), round(statistics.stdev(values), digits)]
        for arm, cell in zip(arms, row[2:], strict=True):
            one = found[name, arm]
            shown = read(cell)
            assert shown[:2] == pytest.approx([one.gain, one.error], abs=0.0501), (name, arm)
            assert (shown[2] if len(shown) > 2 else 0) == pytest.approx(100 * one.added, abs=0.501), (name, arm)

    summaries = {one.arm: one for one in foreign.summarise(comparisons)}
    (means,) = (row for row in rows if row[0] == "mean")
    (counts,) = (row for row in rows if row[0].startswith("above bare"))
    for arm, mean, count in zip(arms, means[2:], counts[2:], strict=True):
        assert read(mean) == pytest.approx([summaries[arm].mean_gain], abs=0.00501)
        assert read(count) == [summaries[arm].wins, summaries[arm].losses]


def test_data_follow_from_the_seed_and_parts_are_disjoint(foreign: ModuleType) -> None:
    for name, problem in foreign.PROBLEMS.items():
        first, again, other = problem.data(1), problem.data(1), problem.data(2)
        for part, same in zip(first, again, strict=True):
            assert torch.equal(part.targets, same.targets), name
            assert all(map(torch.equal, part.inputs, same.inputs)), name
        changed = [not torch.equal(one, two) for one, two in zip(first.train.inputs, other.train.inputs, strict=True)]
        assert any(changed), f"{name}: another seed gives the same data"
        # Inputs with many different values name an example.
        rows = [
            {row.numpy().tobytes() for row in part.inputs[0].flatten(1)} for part in first if part.inputs[0].ndim > 1
        ]
        for index, part in enumerate(rows):
            assert not part & set().union(*rows[index + 1 :]) or name in TEXTS, name


TEXTS = ("lstm_classifier", "gru_language_model", "gpt")
"""Models of a text, in which some lines occur more than once."""
