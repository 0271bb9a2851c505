"""Networks may live on any device: all of a step happens there, and the CPU waits for it at few, known places."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from benchmarks.population import Work
from esper.control.rules import Uniform
from esper.engine.config import EpisodeConfig
from esper.engine.promises import PromiseSettings
from esper.numerics import deferred
from esper.population.population import Strategy
from esper.population.snapshots import Snapshots, roll_back
from esper.rl.episodes import CPU, Episodes
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from reference_population import ReferencePopulation
from rl.far_away import FAR, FarAway
from rl.short import QUICK, ShortSuite, play

READS = 1
"""Per decision, besides the policy's one, and what a rollback or the end of an episode adds: what training and
validation came to, and whether all numbers are finite, all together."""
NETWORKS = 5


def episodes(suite: Suite, device: torch.device, strategy: Strategy = "stacked") -> Episodes:
    chosen = suite.sample(NETWORKS, "train", np.random.default_rng(3))
    return Episodes(suite, chosen, QUICK, strategy=strategy, device=device)


def minibatches(count: int, suite: Suite) -> Suite:
    changed = copy.copy(suite)
    changed.batches_per_step = count
    return changed


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.parametrize("suite", [ShortSuite(), get_suite("digits"), get_suite("mnist1d")], ids=lambda one: one.name)
def test_everything_happens_on_the_networks_device(suite: Suite, strategy: Strategy) -> None:
    with FarAway() as far:
        running = episodes(minibatches(1, suite), FAR, strategy)
        play(running, steps=4)
        population = running.population
        assert population.table.owning.any()
        snapshots = Snapshots.from_state(population.state)
        play(running, steps=1)
        roll_back(population, np.isin(np.arange(population.size), [1, 3]), snapshots)
        running.restart(np.array([0, 2]), running.instances[2:4])
        play(running, steps=1)
        running.final_score()
    assert far.mixtures == []


@pytest.mark.landing
def test_the_loop_over_separate_modules_runs_there_too() -> None:
    with FarAway() as far:
        running = episodes(minibatches(1, ShortSuite()), FAR)
        work = Work.drawn(running, 4)
        loop = ReferencePopulation(running.population.config, running.population.specs.networks)
        for actions in work.script:
            loop.evidence = work.evidence
            loop.decide(actions)
            loop.train(work.batches)
    assert loop.seeds
    assert far.mixtures == []


@pytest.mark.landing
def test_a_decision_waits_no_oftener_for_more_minibatches() -> None:
    found: list[int] = []
    for count in (2, 6):
        with FarAway() as far:
            running = episodes(minibatches(count, ShortSuite()), FAR)
            play(running, steps=3)
            far.forget()
            play(running, steps=3)  # in which data drift
        found.append(len(far.reads))
        assert far.waits == []
    assert found == [3 * READS] * 2


def test_neither_new_episodes_nor_a_look_at_what_blueprints_promise_wait_for_what_they_send() -> None:
    with FarAway() as far:
        conduct = EpisodeConfig(promise=PromiseSettings(every=2, first=1, examples=16))
        chosen = ShortSuite().sample(NETWORKS, "train", np.random.default_rng(3))
        running = Episodes(ShortSuite(), chosen, QUICK, conduct, device=FAR)
        play(running, steps=1)
        running.restart(np.array([0]), running.instances[1:2])
        play(running, steps=2)
    assert far.waits == []
    assert far.mixtures == []


def test_far_away_notices_what_would_wait() -> None:
    with FarAway() as far:
        here, there = torch.arange(3), torch.ones(3, device=FAR)
        there.to(CPU, torch.float64)
        there.to(torch.float64)
        here.to(FAR, non_blocking=True)
        assert (len(far.reads), len(far.waits), len(far.mixtures)) == (1, 0, 0)
        here.to(there)
        assert len(there[here]) == 3
        torch.index_select(there, 0, here)
        assert (len(far.reads), len(far.waits), len(far.mixtures)) == (1, 2, 1)
        for read in (lambda: bool(there.sum() > 0), lambda: there[there > 0], there.nonzero, there.tolist):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tokens", "digits", "mnist1d"])
def test_nothing_but_fetching_waits_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    running, real, fetched = episodes(get_suite(name), torch.device("cuda")), deferred.to_arrays, list[int]()
    play(running, steps=6)  # chooses kernels

    def fetching(*tensors: torch.Tensor) -> list[deferred.Floats]:
        torch.cuda.set_sync_debug_mode("default")
        figures = real(*tensors)
        torch.cuda.set_sync_debug_mode("error")
        fetched.append(len(tensors))
        return figures

    monkeypatch.setattr(deferred, "to_arrays", fetching)
    torch.cuda.set_sync_debug_mode("error")
    try:
        play(running, steps=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(fetched) == 3 * READS
    assert np.isfinite(running.potential).all()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
def test_episodes_on_a_gpu_are_those_of_the_cpu_but_for_rounding(strategy: Strategy) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    suite = ShortSuite()
    near, far = episodes(suite, CPU), episodes(suite, torch.device("cuda"), strategy)
    controller = Uniform()
    state = controller.start([one.seed for one in near.instances])
    for _ in range(3):
        actions, state = controller.act(near.observe(), near.legal_actions(), state)
        expected, found = near.step(actions), far.step(actions)
        np.testing.assert_allclose(found.training.loss, expected.training.loss, rtol=1e-3)
        np.testing.assert_allclose(found.evaluation.loss, expected.evaluation.loss, rtol=1e-3)
