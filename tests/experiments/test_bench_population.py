"""The benchmark gives both sides the same work and reports what its contract says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from esper.cli import main
from esper.experiments.bench_population import BenchTask, bench_population
from esper.experiments.bench_work import Stopwatch, Work, advance, advance_loop, evaluate_separately
from esper.experiments.open_rules import OPEN_RULES
from esper.rl.episodes import Episodes
from esper.training.evaluation import evaluate
from esper.training.population import STRATEGIES
from esper.training.reference import ReferencePopulation
from rl.short import SUITE, instances

DECISIONS = 7


def sides() -> tuple[Episodes, ReferencePopulation, Work]:
    episodes = Episodes(SUITE, instances(5), OPEN_RULES)
    population = episodes.population
    slow = ReferencePopulation(population.config, population.specs.networks)
    return episodes, slow, Work.drawn(episodes, DECISIONS, seed=0)


def test_both_sides_do_the_same_work() -> None:
    episodes, slow, work = sides()
    assert len(work.script) == DECISIONS
    assert len(work.batches) == SUITE.batches_per_step
    fast = episodes.population
    watches = [Stopwatch(torch.device("cpu")) for _ in range(2)]
    advance(fast, work.script, work, watches[0])
    advance_loop(slow, work.script, work, watches[1])
    assert fast.table.owning.any()
    assert np.array_equal(fast.table.stage, slow.table.stage)
    actual, expected = evaluate_separately(slow, work.validation), evaluate(fast, work.validation)
    assert np.array_equal(np.isfinite(actual.loss_contribution), fast.table.owning)
    np.testing.assert_allclose(actual.loss, expected.loss, atol=1e-3)
    np.testing.assert_allclose(actual.loss_contribution, expected.loss_contribution, atol=1e-3)
    for watch in watches:
        assert watch.seconds.keys() == {"lifecycle", "training", "evaluation"}
        assert watch.total == pytest.approx(sum(watch.seconds.values()))


def test_a_watch_adds_laps_and_other_watches() -> None:
    first, second = (Stopwatch(torch.device("cpu")) for _ in range(2))
    for watch in (first, second):
        watch.start()
        watch.lap("a")
        watch.lap("b")
    total = first.total + second.total
    first.add(second)
    assert first.total == pytest.approx(total)
    assert first.seconds.keys() == {"a", "b"}


def test_rates_ratio_and_shares_fit_together() -> None:
    result = bench_population(BenchTask("tokens", 2, repeats=1, strategy="auto", device="cpu", seed=0))
    assert result.strategy in STRATEGIES
    assert min(result.population, result.loop, result.environment) > 0
    assert result.ratio == pytest.approx(result.population / result.loop)
    assert sum(result.shares.values()) == pytest.approx(1)
    assert result.shares.keys() == {"gradients", "optimizer", "lifecycle", "evaluation"}
    assert min(result.shares.values()) > 0


@pytest.mark.slow
def test_the_last_line_is_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "population", "--suites", "tokens", "--environments", "1", "2", "--repeats", "1", "--json"]
    assert main(words) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["ratio"].keys() == {"1", "2"}
    assert all(ratio > 0 for ratio in record["ratio"].values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "nowhere"], "there is no device 'nowhere' on this machine"),
        (["--suites", "token"], "tokens"),
        (["--environments", "0"], "at least 1"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "population", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
