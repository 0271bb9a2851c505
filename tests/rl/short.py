"""Episodes on the token suite that are over soon."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from esper.control.controller import Controller
from esper.control.rules import Uniform
from esper.engine.engine import GrowthConfig
from esper.lifecycle.rules import Rules
from esper.rl.episodes import Episodes, StepResult
from esper.rl.rewards import RewardSettings
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite
from esper.tasks.token_suite import TokenSuite
from open_rules import open_rules

QUICK = open_rules(cooldown=(1, 1, 1), min_training_steps=1)


class ShortSuite(TokenSuite):
    """The token suite with small episodes."""

    steps = 12
    batches_per_step = 2
    batch_size = 16
    validation_size = 64
    test_size = 96


SUITE = ShortSuite()


def instances(count: int, drift_step: int | None = None) -> list[Instance]:
    """Training instances, one of each family and then another; those that drift do so within the episode."""
    drawn = SUITE.sample(count, "train", np.random.default_rng(3))
    return [one if one.drift_step is None else replace(one, drift_step=drift_step or 5) for one in drawn]


def episodes(
    chosen: Sequence[Instance],
    rules: Rules = QUICK,
    growth: GrowthConfig = GrowthConfig(),  # noqa: B008 (immutable)
    suite: Suite = SUITE,
    **reward: Any,
) -> Episodes:
    """Episodes that are paid by the settings ``reward``."""
    return Episodes(suite, chosen, rules, growth, rewards=[RewardSettings(**reward)] * len(chosen))


def play(running: Episodes, controller: Controller | None = None, steps: int | None = None) -> list[StepResult]:
    """Let a controller (a random one if none is given) play to the end, or for some steps."""
    controller = controller or Uniform()
    state = controller.start([one.seed for one in running.instances])
    results: list[StepResult] = []
    while len(results) != steps and not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        results.append(running.step(actions))
    return results
