"""The governor leaves healthy networks alone, whatever a random controller does to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from esper.control.rules import Uniform
from esper.lifecycle.rules import Rules
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("tokens", 128), ("digits", 128), ("mnist1d_conv", 24)])
def test_healthy_networks_are_not_rolled_back(name: str, count: int, count_figure: Callable[[str, int], None]) -> None:
    suite = get_suite(name)
    chosen = suite.sample(count, "train", np.random.default_rng(1))
    running, controller = Episodes(suite, chosen, Rules()), Uniform()
    state = controller.start([one.seed for one in chosen])
    while not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        assert not running.step(actions).rollbacks
    count_figure("checks of healthy networks without a false alarm", count * suite.steps)
