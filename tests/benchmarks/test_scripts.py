"""Benchmarks and examples, which take too long to be run by tests, at least find in Esper what they import."""

import ast
import importlib
import json
import threading
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks import interrupted_saves, operations
from benchmarks.operations import Player, measure_costs
from benchmarks.population import Work, advance, advance_loop, evaluate_separately
from benchmarks.promise import compare as compare_with_promises
from benchmarks.promise import promised, sample, score_with
from benchmarks.result_files import ResultFile
from benchmarks.telemetry import AT_ONCE, follow, step_events
from esper.control.rules import LookRule, LookSettings
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.rules import Rules
from esper.numerics.devices import describe_platform
from esper.population.evaluation import evaluate
from esper.population.parameters import SeedKind
from esper.rl.episodes import Episodes
from esper.runs.store import RunStore, encode_events
from esper.tasks.registry import get_suite
from esper.train.evaluation import CohortPart, CohortTask, EvaluationConfig, evaluate_cohort
from open_rules import OPEN_RULES
from reference_population import ReferencePopulation
from rl.short import SUITE, instances

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    imported = [(node.module, name.name) for node in imports for name in node.names if node.module]
    ours = [(module, name) for module, name in imported if module.partition(".")[0] == "esper"]
    missing = [f"{module}.{name}" for module, name in ours if not hasattr(import_module(module), name)]
    assert missing == []


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


@pytest.mark.landing
@pytest.mark.parametrize("moves", [1, 2, 4])
@pytest.mark.parametrize("loop", ["grower", "ladder"])
def test_a_loop_stopped_while_it_saves_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str, moves: int
) -> None:
    interrupted_saves.main(loop, tmp_path / "whole")
    replace, left = Path.replace, iter(range(moves))

    def replace_or_die(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_or_die)
        with pytest.raises(Killed):
            interrupted_saves.main(loop, tmp_path / "cut")
    interrupted_saves.main(loop, tmp_path / "cut")
    whole, cut = ((tmp_path / name / "result.safetensors").read_bytes() for name in ("whole", "cut"))
    assert cut == whole


def test_candidates_are_scored_and_looked_at_instance_by_instance() -> None:
    instances = sample(3, 1, "transfer")
    assert {one.family for one in instances} == {"pointer", "halves", "product"}
    found = promised(instances)
    assert {values.shape for values in found.values()} == {(3, 3, 7)}
    alone = promised(instances[1:2])["promise, 64 examples"]
    np.testing.assert_allclose(alone[0], found["promise, 64 examples"][1], rtol=1e-4)
    score = score_with(instances[:1], (SeedKind(0, 0, Blend.ADD),))
    assert score.shape == (1,)
    assert 0 <= score[0] <= 1
    assert score_with(instances[:1], ()) != score


def test_the_table_picks_what_is_promised_most() -> None:
    scores = np.array([[[0.2, 0.6]], [[0.9, 0.1]]])
    table = compare_with_promises(scores, np.array([0.1, 0.3]), {"right": scores, "wrong": -scores})
    cells = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    ranks = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert cells["nothing grown"] == "0.200"
    assert cells["a random candidate"] == "0.450"
    assert cells["the best one for all, in hindsight"] == "0.550"
    assert str(cells["right"]).startswith("0.750 ")
    assert str(cells["wrong"]).startswith("0.150 ")
    assert cells["the best one for each, in hindsight"] == "0.750"
    assert (ranks["right"], ranks["wrong"]) == ("1.00", "-1.00")


@dataclass(frozen=True)
class Result:
    """Of one run."""

    seed: int


def test_the_software_that_made_results_is_kept_beside_them(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl", Result)
    earlier = json.dumps({"torch": "1.0"})
    (tmp_path / "results.platforms").write_text(earlier + "\n")
    file.add(Result(1))
    file.add(Result(2))
    assert (tmp_path / "results.platforms").read_text().splitlines() == [
        earlier,
        json.dumps(describe_platform(["cpu"])),
    ]
    assert file.results == [Result(1), Result(2)]


def test_only_what_is_missing_runs(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl", Result)
    file.add(Result(1))
    ran = list[int]()

    def run(seed: int) -> None:
        ran.append(seed)
        file.add(Result(seed))

    file.run_missing([0, 1, 2], lambda seed: Result(seed) in file.results, run)
    assert ran == [0, 2]


def test_time_is_split_into_what_networks_add_and_the_rest(monkeypatch: pytest.MonkeyPatch):
    """A decision that takes 30 ms and 2 ms for each network, by a clock of the test."""
    clock = [0.0]
    monkeypatch.setattr(operations, "time", type("Clock", (), {"perf_counter": lambda: clock[0]}))

    class Steady(Player):
        def __init__(self, size: int) -> None:
            self.size = size

        def decide(self) -> None:
            torch.mm(torch.ones(self.size, 3), torch.ones(3, 5))
            clock[0] += 0.03 + 0.002 * self.size

    found = measure_costs([Steady(size) for size in (16, 32, 64)])
    assert found.fixed == pytest.approx(0.03)
    assert found.each == pytest.approx(0.002)
    assert found.flops == 2 * 3 * 5


PLAYED = 7


def test_both_sides_do_the_same_work() -> None:
    episodes = Episodes(SUITE, instances(5), OPEN_RULES)
    fast = episodes.population
    slow = ReferencePopulation(fast.config, fast.specs.networks)
    work = Work.drawn(episodes, PLAYED)
    assert len(work.script) == PLAYED
    assert len(work.batches) == SUITE.batches_per_step
    for actions in work.script:
        advance(fast, actions, work)
        advance_loop(slow, actions, work)
    assert fast.table.owning.any()
    assert np.array_equal(fast.table.stage, slow.table.stage)
    actual, expected = evaluate_separately(slow, work.validation), evaluate(fast, work.validation)
    assert np.array_equal(np.isfinite(actual.loss_contribution), fast.table.owning)
    np.testing.assert_allclose(actual.loss, expected.loss, atol=1e-3)
    np.testing.assert_allclose(actual.loss_contribution, expected.loss_contribution, atol=1e-3)


def judged(path: Path, starts: list[int], expected: int) -> str | None:
    """The follower's record of a store with these events in it."""
    ours, theirs = Pipe()
    with RunStore.create(path) as store:
        for first in starts:
            store.append(encode_events(step_events(first)))
        store.flush()
        ours.send(expected)
        thread = threading.Thread(target=follow, args=(path, theirs))
        thread.start()
        assert ours.recv() == "ready"
        fault = ours.recv()
        thread.join()
    return fault


@pytest.mark.parametrize(
    ("starts", "expected", "fault"),
    [
        ([0, AT_ONCE], 2 * AT_ONCE, None),
        ([0, AT_ONCE, 2 * AT_ONCE], 2 * AT_ONCE, f"{3 * AT_ONCE} events came of {2 * AT_ONCE}"),
        ([0, 2 * AT_ONCE], 3 * AT_ONCE, f"instead of event {AT_ONCE} came StepTaken"),
        ([AT_ONCE, 0], 2 * AT_ONCE, "instead of event 0 came StepTaken"),
    ],
)
def test_a_follower_notices_what_is_missing_or_out_of_order(
    tmp_path: Path, starts: list[int], expected: int, fault: str | None
) -> None:
    found = judged(tmp_path / "run.db", starts, expected)
    assert (found or "").startswith(fault or "")
    assert (found is None) == (fault is None)


# Branches off the rule: copies are copies, each takes one other choice, and errors are over suites.


GENERATED = "generated:9201"


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("branches")


def test_a_copy_that_takes_no_other_choice_ends_as_its_original(branches: ModuleType) -> None:
    suite = get_suite(GENERATED)
    (instance,) = suite.sample(1, "train", np.random.default_rng(0))
    rule = LookRule(LookSettings(), suite.steps)
    played = [rule, branches.Branching(rule, np.full(2, -1), seed=0)]
    config = EvaluationConfig(GENERATED, Rules()).for_controller(rule)
    (original,), copies = (
        result.records
        for result in evaluate_cohort(
            CohortTask(config, [CohortPart(played[0], [instance]), CohortPart(played[1], [instance] * 2)])
        )
    )
    assert {(one.score, one.added_parameters) for one in copies} == {(original.score, original.added_parameters)}
    assert not played[1].described


def test_each_copy_takes_one_other_legal_choice(branches: ModuleType) -> None:
    """Choices are legal, or the episodes would refuse them, and are what the rule does not do there."""
    collected = branches.collect_branches(branches.Collection(GENERATED, 0.0, 1, 5))
    count = len(collected["worth"])
    assert 1 <= count <= 5
    assert {len(values) for values in collected.values()} == {count}
    width = collected["described"].shape[1]
    ops = len(Op)
    # The operation taken and that of the rule are among what is described.
    one_hot = np.eye(ops)[collected["ops"]].reshape(count, -1)
    starts = [
        start
        for start in range(width - 2 * ops + 1)
        if (collected["described"][:, start:][:, : 2 * ops] == one_hot).all()
    ]
    assert starts


def test_errors_are_over_clusters(branches: ModuleType) -> None:
    values = np.array([1.0, 2.0, 4.0, 7.0])
    alone = branches.compute_error(values, np.arange(4))
    assert alone == pytest.approx(values.std() / 2)
    # Twice the same values in one cluster are no more evidence than once.
    doubled = branches.compute_error(np.repeat(values, 2), np.repeat(np.arange(4), 2))
    assert doubled == pytest.approx(alone)


def test_the_page_has_the_rollbacks_that_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    rollbacks = importlib.import_module("rollbacks")
    lines = (ROOT / "benchmarks/results/rollbacks/rollbacks.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert {result["recipe"] for result in results} == rollbacks.RECIPES.keys()
    healthy, sick = ([one for one in results if one["sick"] is ill] for ill in (False, True))
    assert not any(result["rollbacks"] for result in healthy)
    late = max(result["rollbacks"][0] - rollbacks.SICK_FROM for result in sick)
    sentence = (
        f"Of {len(healthy)} healthy trainings none was rolled back in {rollbacks.DECISIONS} decisions, and of "
        f"{len(sick)} sick ones all, at most {late} decisions late"
    )
    assert sentence in " ".join((ROOT / "docs/reliability.md").read_text().split())
