"""Networks may live on any device: all of a step happens there, and the CPU waits for it at few, known places."""

import copy

import numpy as np
import pytest
import torch

from benchmarks.population import Work
from esper.control.rules import Uniform
from esper.engine.engine import GrowthConfig
from esper.growth.promise import PromiseSettings
from esper.numerics import devices
from esper.numerics.arrays import Floats
from esper.population.backend import Snapshots, roll_back
from esper.population.forward import select_committed
from esper.population.population import Strategy
from esper.population.shapley import attribute_networks
from esper.rl.episodes import CPU, Episodes
from esper.rl.ppo import PPO, PPOSettings
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from reference_population import ReferencePopulation
from rl.far_away import FAR, FarAway
from rl.probes import learner, rollouts
from rl.short import QUICK, ShortSuite, play

READS = 1
"""Per decision, besides the policy's one, and what a rollback or the end of an episode adds: what training and
validation came to, and whether all numbers are finite, all together."""
NETWORKS = 5
COPIES_OF_NEW_EPISODES = 30
"""At most: the template's tensors, one by one, and then the data and the rows of all networks together."""


def episodes(suite: Suite, device: torch.device, strategy: Strategy = "stacked") -> Episodes:
    chosen = suite.sample(NETWORKS, "train", np.random.default_rng(3))
    config = GrowthConfig(promise=PromiseSettings(first=6, every=4, examples=8))
    return Episodes(suite, chosen, QUICK, config, strategy=strategy, device=device)


def minibatches(count: int, suite: Suite) -> Suite:
    changed = copy.copy(suite)
    changed.batches_per_step = count
    return changed


def life(running: Episodes) -> list[Floats]:
    """All that may happen to a population, and the figures of it."""
    figures: list[Floats] = []

    def play_on(steps: int) -> None:
        for result in play(running, steps=steps):
            figures.extend((result.training.loss, result.evaluation.loss, result.reward, result.training.health.norm))

    play_on(4)
    population = running.population
    assert population.table.owning.any()
    snapshots = Snapshots.from_state(population.state)
    play_on(1)
    roll_back(population, np.isin(np.arange(population.size), [1, 3]), snapshots)
    running.restart(np.array([0, 2]), running.instances[2:4])
    play_on(2)  # in which data drift and promises are measured
    figures += [running.final_score().score, *(part.numpy() for part in running.observe())]
    active = select_committed(population)
    shapley = attribute_networks(population, running.validation, np.random.default_rng(0), active)
    return [*figures, shapley.values]


@pytest.mark.landing
@pytest.mark.parametrize(
    ("suite", "strategy"),
    [
        (ShortSuite(), "stacked"),
        (ShortSuite(), "looped"),
        (get_suite("digits"), "stacked"),
        (get_suite("mnist1d"), "looped"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_everything_happens_on_the_networks_device_with_the_bits_of_the_cpu(suite: Suite, strategy: Strategy) -> None:
    suite = minibatches(1, suite)
    with FarAway() as far:
        found = life(episodes(suite, FAR, strategy))
    for one, other in zip(found, life(episodes(suite, CPU, strategy)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert far.undetermined == []


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.landing) for name in ("tokens", "mnist1d_conv")), "digits"]
)
def test_nothing_but_what_is_fetched_is_waited_for(name: str) -> None:
    with FarAway() as far:
        running = episodes(minibatches(1, get_suite(name)), FAR)
        assert far.reads == []
        assert len(far.sent) <= COPIES_OF_NEW_EPISODES
        far.forget()
        play(running, steps=3)
        assert far.reads == ["numerics/devices.py to_arrays"] * 3 * READS
        far.forget()
        running.restart(np.array([0, 2]), running.instances[2:4])
        assert far.reads == []
        assert far.sent.count("rl/episodes.py _set_validation") == 1  # the rows: their data are sent together
        assert far.sent.count("population/learning.py stack_data") == 2
        running.final_score()
        assert len(far.reads) == 1
    assert far.waits == []


@pytest.mark.landing
def test_the_loop_over_separate_modules_runs_there_too() -> None:
    with FarAway():
        running = episodes(minibatches(1, ShortSuite()), FAR)
        work = Work.drawn(running, 4)
        loop = ReferencePopulation(running.population.config, running.population.specs.networks)
        for actions in work.script:
            loop.measurements = work.measurements
            loop.decide(actions)
            loop.train(work.batches)
    assert loop.seeds


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
    assert found == [3 * READS + 1] * 2  # and promises, once


MINIBATCHES = 2
READS_OF_STATISTICS = 10
"""Per update, to select the steps that belong to episodes."""
SETTINGS = PPOSettings(epochs=2, minibatches=MINIBATCHES, no_growth_baseline=False, group=2, target_kl=10.0)


@pytest.mark.parametrize("record", [False, True])
def test_an_update_waits_once_per_minibatch_and_once_for_its_figures(record: bool) -> None:
    near = learner(SETTINGS)
    (rollout,) = rollouts(near, 1)
    with FarAway() as far:
        student = PPO(copy.deepcopy(near.policy).to(FAR), SETTINGS, 0)
        there = rollout.to(FAR)
        far.forget()
        minibatches = [list[dict[str, float]](), list[dict[str, float]]()] if record else [None, None]
        found = student.update(there, 0.0, record=minibatches[1])
        steps = SETTINGS.epochs * MINIBATCHES
        assert found["optimizer_steps"] == steps
        # Which steps belong to episodes, and whether the step is taken; of recorded minibatches, figures and norms.
        recorded = steps if record else 0
        places = {"rl/ppo.py backward": steps, "rl/ppo.py update": steps, "rl/ppo.py fetch_figures": 1 + recorded}
        assert {place: far.reads.count(place) for place in places} == places
        assert len(far.reads) <= sum(places.values()) + READS_OF_STATISTICS
        assert set(far.waits) <= {"rl/ppo.py update"}  # the weights of the entropies
        assert len(far.waits) <= 1
        assert far.undetermined == []
        weights = {name: value.cpu() for name, value in student.policy.state_dict().items()}
    expected = near.update(rollout, 0.0, record=minibatches[0])
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for name, value in near.policy.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5)
    if record:
        for one, other in zip(*minibatches, strict=True):
            assert one == pytest.approx(other, rel=1e-2, abs=1e-4)


def test_neither_new_episodes_nor_a_look_at_what_blueprints_promise_wait_for_what_they_send() -> None:
    with FarAway() as far:
        growth = GrowthConfig(promise=PromiseSettings(every=2, first=1, examples=16))
        chosen = ShortSuite().sample(NETWORKS, "train", np.random.default_rng(3))
        running = Episodes(ShortSuite(), chosen, QUICK, growth, device=FAR)
        play(running, steps=1)
        running.restart(np.array([0]), running.instances[1:2])
        play(running, steps=2)
    assert far.waits == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tokens", "digits", "mnist1d"])
def test_nothing_but_fetching_waits_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    running, real, fetched = episodes(get_suite(name), torch.device("cuda")), devices.to_arrays, list[int]()
    play(running, steps=6)  # chooses kernels

    def fetching(*tensors: torch.Tensor) -> list[devices.Floats]:
        torch.cuda.set_sync_debug_mode("default")
        figures = real(*tensors)
        torch.cuda.set_sync_debug_mode("error")
        fetched.append(len(tensors))
        return figures

    monkeypatch.setattr(devices, "to_arrays", fetching)
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
