"""Recorded actions come back as they were, as far as they are legal."""

from __future__ import annotations

import numpy as np
import pytest

from esper.control.rules.replay import Replay, shuffled
from esper.control.rules.simple import Uniform
from esper.errors import ConfigError
from esper.lifecycle.actions import Op, action, wait
from rl.short import SUITE, episodes, instances


def recorded(count: int) -> tuple[np.ndarray, list[float]]:
    """Actions of a random controller, and J of what they led to."""
    running, controller = episodes(instances(count)), Uniform()
    state, taken = controller.start(range(count)), []
    while not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        running.step(actions)
        taken.append(actions)
    return np.stack(taken), running.potential.tolist()


def test_the_same_actions_on_the_same_networks_lead_to_the_same_end() -> None:
    actions, objective = recorded(5)
    running = episodes(instances(5))
    seeds = [one.seed for one in running.instances]
    replay = Replay({seed: actions[:, place] for place, seed in enumerate(seeds)})
    state, taken = replay.start(seeds), []
    while not running.finished.all():
        chosen, state = replay.act(running.observe(), running.legal_actions(), state)
        running.step(chosen)
        taken.append(chosen)
    np.testing.assert_array_equal(np.stack(taken), actions)
    assert running.potential.tolist() == objective


def test_what_is_not_legal_or_not_recorded_is_waiting() -> None:
    running = episodes(instances(2))
    seeds = [one.seed for one in running.instances]
    recording = {seeds[0]: np.stack([action(Op.PRUNE, 1), action(Op.GERMINATE, 0, 1)]), seeds[1]: wait(1)}
    replay = Replay(recording)
    state = replay.start(seeds)
    ops: list[list[int]] = []
    for _ in range(3):
        chosen, state = replay.act(running.observe(), running.legal_actions(), state)
        running.step(chosen)
        ops.append(chosen[:, 0].tolist())
    assert ops == [[Op.WAIT, Op.WAIT], [Op.GERMINATE, Op.WAIT], [Op.WAIT, Op.WAIT]]


@pytest.mark.parametrize("count", [2, 3, 17])
def test_shuffled_gives_everybody_the_actions_of_somebody_else(count: int) -> None:
    actions = np.arange(count)[None, :, None] + np.zeros((SUITE.steps, count, 8), np.int64)
    seeds = [100 + place for place in range(count)]
    _, sequences = shuffled(actions, seeds, np.random.default_rng(0)).start(seeds)
    donors = [int(sequence[0, 0]) for sequence in sequences]
    assert sorted(donors) == list(range(count))
    assert all(donor != place for place, donor in enumerate(donors))


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the actions for seed 3 are \(8,\), but must be \[T, 8\]"):
        Replay({3: np.zeros(8, np.int64)})
    with pytest.raises(ConfigError, match="no actions were recorded for seed 9"):
        Replay({3: wait(4)}).start([3, 9])
    with pytest.raises(ConfigError, match="at least two"):
        shuffled(np.zeros((2, 1, 8), np.int64), [1], np.random.default_rng(0))
