"""What episodes show of promise: measured when it is due, on the newest training examples, and without any effect."""

import numpy as np
import pytest
import torch

from esper.engine.engine import GrowthConfig
from esper.engine.observation import FeatureReader
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import make_wait_actions
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.learning import Batch, draw_shuffled_order
from esper.population.promise import PromiseMeter
from esper.rl.episodes import Episodes
from esper.tasks.instance import Instance
from rl.short import SUITE, episodes, instances, play

EXAMPLES = 24
EACH_STEP = SUITE.batches_per_step * SUITE.batch_size
SETTINGS = PromiseSettings(first=2, every=4, examples=EXAMPLES)


def looking(chosen: list[Instance], settings: PromiseSettings = SETTINGS) -> Episodes:
    return episodes(chosen, growth=GrowthConfig(promise=settings))


def newest(instance: Instance, steps: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last examples that an instance's network trained on in so many steps, in its order."""
    rng = numpy_generator(instance.seed, Stream.DATA_ORDER)
    order = draw_shuffled_order(instance.train_size, SUITE.steps * EACH_STEP, rng)[steps * EACH_STEP - count :][:count]
    data = SUITE.data(instance, "train")
    return data.inputs[order], data.labels[order]


@pytest.mark.parametrize("wanted", [EXAMPLES, 10_000], ids=["some", "more than there are"])
def test_it_is_of_the_newest_examples_and_the_network_as_it_is(wanted: int) -> None:
    chosen = [one for one in instances(14) if one.drift_step is None][:3]
    settings = SETTINGS.model_copy(update={"examples": wanted})
    running, twin = looking(chosen, settings), episodes(chosen)
    for _ in range(settings.first):
        running.step(make_wait_actions(3))
        twin.step(make_wait_actions(3))
    count = min(wanted, EACH_STEP)
    inputs, labels = zip(*(newest(one, settings.first, count) for one in chosen), strict=True)
    batch = Batch(torch.stack(inputs), torch.stack(labels))
    expected = PromiseMeter(twin.population).measure(batch, np.ones((3, 3), np.bool_))
    seen = FeatureReader(running.observe())
    np.testing.assert_allclose(seen.blueprint("promise"), expected.fitted, rtol=1e-5)
    np.testing.assert_allclose(seen.blueprint("promise_held_out"), expected.held_out, rtol=1e-4, atol=1e-6)
    assert (seen.blueprint("promise") > 0).all()


def test_looking_changes_nothing_but_what_is_seen() -> None:
    chosen = instances(5)
    plain, seeing = play(episodes(chosen)), play(looking(chosen))
    for one, other in zip(plain, seeing, strict=True):
        assert np.array_equal(one.evaluation.loss, other.evaluation.loss)
        assert np.array_equal(one.reward, other.reward)


def test_each_network_is_measured_by_its_own_clock() -> None:
    chosen = instances(3)
    running = looking(chosen)
    for _ in range(3):
        running.step(make_wait_actions(3))
    running.restart(np.array([1]), [chosen[1]])
    assert not FeatureReader(running.observe()).blueprint("promise")[1].any()
    for _ in range(2):
        running.step(make_wait_actions(3))
    alone = looking([chosen[1]])
    for _ in range(2):
        alone.step(make_wait_actions(1))
    for name in ("promise", "promise_held_out"):
        now, own = (FeatureReader(one.observe()).blueprint(name) for one in (running, alone))
        np.testing.assert_allclose(now[1], own[0], rtol=1e-5, atol=1e-6)
    assert FeatureReader(running.observe()).network("promise_age") * SUITE.steps == pytest.approx([3, 0, 3])
