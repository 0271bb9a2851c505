"""Let a baseline show what it does, as rollouts that a policy can imitate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from esper.control.controller import Controller
from esper.control.observation import mask_tensors
from esper.control.policy import PolicyStep
from esper.experiments.baselines import baselines
from esper.experiments.collect import joined, new_policy
from esper.experiments.placement import Placed
from esper.experiments.play import COHORT, terms_of
from esper.experiments.settings import TrainSettings
from esper.experiments.workers import Workers
from esper.rl.cloning import CloningSettings
from esper.rl.episodes import CPU
from esper.rl.rewards.scheme import in_turns
from esper.rl.rollout import Rollout, RolloutBuffer
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

_STREAM = 9
"""Keeps the instances of demonstrations apart from those of training."""


@dataclass(frozen=True)
class DemonstrationTask(Placed):
    """A controller on some instances."""

    settings: TrainSettings
    controller: Controller
    instances: Sequence[Instance]

    @property
    def device(self) -> str:
        return self.settings.devices[0]


def demonstrations(settings: TrainSettings, cloning: CloningSettings, workers: Workers) -> Rollout:
    """Whole episodes of the baseline, paid as the policy will be."""
    suite = get_suite(settings.suite)
    known = {controller.name: controller for controller in baselines(suite)}
    instances = suite.sample(cloning.episodes, "train", np.random.default_rng((settings.seed, _STREAM)))
    parts = [instances[start : start + COHORT] for start in range(0, len(instances), COHORT)]
    tasks = [DemonstrationTask(settings, known[cloning.controller], part) for part in parts]
    return joined(workers.map(demonstrate, tasks))


def demonstrate(task: DemonstrationTask) -> Rollout:
    """The controller's episodes, to their end; log-probabilities and values are 0, as nobody computed them."""
    settings, count = task.settings, len(task.instances)
    rewards = in_turns([one.at(0.0) for one in settings.reward], count)
    episodes = terms_of(settings, task.device).episodes(task.instances, rewards=rewards)
    memory = new_policy(settings).initial_state(count)
    buffer = RolloutBuffer(episodes.suite.steps, count, memory)
    state = task.controller.start([instance.seed for instance in task.instances])
    nothing = torch.zeros(count)
    for _ in range(episodes.suite.steps):
        observation, legal = episodes.observe(), episodes.legal_actions()
        actions, state = task.controller.act(observation, legal, state)
        result = episodes.step(actions)
        step = PolicyStep(torch.from_numpy(actions), torch.zeros(actions.shape), nothing, memory, ())
        reward, running = torch.from_numpy(result.reward).float(), torch.from_numpy(result.running)
        buffer.add(observation, mask_tensors(legal, CPU), step, reward, running)
    return buffer.finish(torch.ones(count, dtype=torch.bool), nothing)
