"""Collect rollouts: whole episodes of the acting policy, computed in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.config.loading import load_settings
from esper.config.settings import compare_settings
from esper.control.advice import append_advice
from esper.control.learned import LearnedController, PolicyOrigin, count_policy_features, restore_policy
from esper.control.policy import Policy
from esper.control.rules import LookRule
from esper.control.shipped import open_policy
from esper.engine.observation import make_mask_tensors
from esper.engine.promises import PromiseSettings
from esper.errors import ConfigError
from esper.lifecycle.actions import Head, make_wait_actions
from esper.numerics.devices import require_device
from esper.numerics.random_streams import Stream, numpy_generator
from esper.rl.episodes import CPU, Episodes
from esper.rl.rewards import assign_rewards
from esper.rl.rollout import Rollout, RolloutBuffer
from esper.runs.store import EventRow, encode_events
from esper.serialization.checkpoints import Checkpoints
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.episode_log import EpisodeLog
from esper.train.evaluation import make_evaluation_config
from esper.train.event_recorder import EventRecorder
from esper.train.settings import TrainSettings
from esper.train.workers import DeviceTask, Shared, explain_out_of_memory


@dataclass(frozen=True)
class ShardTask(DeviceTask):
    """One shard of one iteration's rollout."""

    settings: TrainSettings
    iteration: int
    shard: int
    weights: Shared[Mapping[str, Tensor]]
    """The acting policy's state dict, on the CPU."""

    @property
    def device(self) -> str:
        devices = self.settings.devices
        return devices[self.shard % len(devices)]


@dataclass(frozen=True)
class ShardResult:
    """The shard's rollout, on the CPU, and what happened in it."""

    rollout: Rollout
    log: EpisodeLog
    events: Sequence[EventRow]
    """The shard's events in order, with the times at which they happened."""
    twin_steps: int = 0
    """Decisions, all of them to wait, in the episodes of the twins, which the log does not know."""


def create_policy(settings: TrainSettings) -> Policy:
    """The untrained policy of a run."""
    spec = count_policy_features(settings.policy, settings.promise)
    return Policy(spec, settings.policy, torch.Generator().manual_seed(settings.seed))


def load_start(settings: TrainSettings, name: str) -> dict[str, Tensor]:
    """The weights and statistics of the policy with which a run starts that goes on from another.

    Raises:
        ConfigError: there is none, or its settings are others.
        CheckpointError, RunError: it cannot be read.
    """
    run = open_policy(name)
    origin = load_settings(PolicyOrigin, run.config)
    differ = [one.key for one in compare_settings(settings.policy, origin.policy)]
    if differ or settings.promise != origin.promise:
        raise ConfigError(
            f"start_from: the policy of {name} has other settings ({', '.join(differ) or 'conduct.promise'}): set "
            f"policy and conduct.promise as in {run.config}"
        )
    return restore_policy(Checkpoints(run.checkpoints).latest().tensors, origin.policy, origin.promise).state_dict()


def check_start_policy(settings: TrainSettings) -> None:
    """Raises what `load_start` raises, before anything is made for a run that could not begin."""
    if settings.start_from is not None:
        load_start(settings, settings.start_from)


def create_advisor(settings: TrainSettings, suite: Suite) -> LookRule | None:
    """The rule that advises a run's policy on a suite; None without advice."""
    advice = settings.policy.advice
    return None if advice is None else LookRule(advice.rule, suite.steps)


def create_greedy_controller(policy: Policy, settings: TrainSettings) -> LearnedController:
    """The policy of a run, on the CPU, taking what it likes best."""
    advisor = create_advisor(settings, get_suite(settings.suite))
    return LearnedController(policy, greedy=True, promise=settings.promise, advisor=advisor)


def sample_instances(settings: TrainSettings, iteration: int, shard: int) -> list[Instance]:
    """The training instances of a shard, one per environment: groups of neighbours share theirs."""
    seed, group = settings.seed, settings.ppo.group
    suite, own = get_suite(settings.draw_suite(iteration, shard)), settings.environments // settings.shards // group
    if settings.mix:
        drawn = suite.sample(own, "train", numpy_generator(seed, iteration, shard, Stream.TRAINING_INSTANCES))
    else:
        # All shards together, so that every one has its part of the families.
        rng = numpy_generator(seed, iteration, Stream.TRAINING_INSTANCES)
        drawn = suite.sample(settings.environments // group, "train", rng)[shard * own : (shard + 1) * own]
    return [instance for instance in drawn for _ in range(group)]


@explain_out_of_memory()
def collect(task: ShardTask) -> ShardResult:
    """Run the shard's episodes to their end, and those of their twins, where there are any.

    Raises:
        RunError: the device's memory ran out.
    """
    settings, suite = task.settings, get_suite(task.settings.draw_suite(task.iteration, task.shard))
    size, group = settings.environments // settings.shards, settings.ppo.group
    first = task.shard * size
    policy = create_policy(settings)
    policy.load_state_dict(dict(task.weights.get()))
    policy.to(require_device(task.device))

    # Uniform numbers [T, E, 8] that decide the actions: an environment has the same ones in whatever shard it is.
    generators = [
        numpy_generator(settings.seed, task.iteration, number, Stream.ACTIONS) for number in range(first, first + size)
    ]
    noise = np.stack([generator.random((suite.steps, len(Head))) for generator in generators], axis=1)

    # The run's slots and blueprints are those of its own suite: nobody could read what happens on others.
    episodes = _start_episodes(task, 1, settings.promise)
    recorder = None
    if suite.name == settings.suite:
        number, telemetry = task.iteration + 1, settings.telemetry
        steps = telemetry.records_steps(number)
        watched = telemetry.select_watched(settings.environments) if steps else ()
        recorder = EventRecorder(episodes, Scope(number, first, steps, watched))
    advisor = create_advisor(settings, suite)
    result = run_policy(policy, advisor, episodes, torch.from_numpy(noise).float(), recorder)
    if not settings.ppo.no_growth_baseline:
        return result

    # Twins are a population of their own: the others' numbers are the same with twins and without, to the last bit.
    twins = _start_episodes(task, group, None)
    waited = [twins.step(make_wait_actions(twins.size)) for _ in range(suite.steps)]
    earned = torch.from_numpy(np.stack([step.reward for step in waited])).float()
    rollout = result.rollout._replace(control_variate=earned.repeat_interleave(group, 1))
    return replace(result, rollout=rollout, twin_steps=sum(int(step.running.sum()) for step in waited))


def _start_episodes(task: ShardTask, every: int, promise: PromiseSettings | None) -> Episodes:
    """New episodes of each ``every``-th environment, with promises measured in that way, or not at all."""
    settings = task.settings
    instances = sample_instances(settings, task.iteration, task.shard)
    paid = [one.at(task.iteration / settings.iterations) for one in settings.reward]
    first = task.shard * len(instances)
    rewards = assign_rewards(paid, settings.environments, settings.ppo.group)[first : first + len(instances)]
    terms = replace(
        make_evaluation_config(settings, task.device), suite=settings.draw_suite(task.iteration, task.shard)
    )
    return terms.with_promise(promise).create_episodes(instances[::every], rewards=rewards[::every])


def run_policy(
    policy: Policy, advisor: LookRule | None, episodes: Episodes, noise: Tensor, recorder: EventRecorder | None
) -> ShardResult:
    """Let the policy act, with uniform numbers ``noise [T, E, 8]``, until all episodes end."""
    device, state = policy.device, policy.initial_state(episodes.size)
    buffer = RolloutBuffer(len(noise), episodes.size, state.to(CPU))
    log = EpisodeLog(episodes.suite, episodes.instances)
    events = [] if recorder is None else encode_events(recorder.record_start())
    for uniforms in noise.to(device):
        observation, legal = episodes.observe(), episodes.legal_actions()
        observation = observation if advisor is None else append_advice(advisor, observation, legal)
        masks = make_mask_tensors(legal, CPU)
        step = policy.act(observation.to(device), masks.to(device), state, uniforms).to_cpu()
        actions = step.actions.numpy()
        if recorder is not None:
            events += encode_events(recorder.record_observation(observation, step))
        result = episodes.step(actions)
        if recorder is not None:
            events += encode_events(recorder.record_step(actions, result, step))
        running = torch.from_numpy(result.running)
        buffer.add(observation, masks, step, torch.from_numpy(result.reward).float(), running)
        log.add(actions, result)
        state = step.state
    log.finish(episodes)
    everyone = torch.ones(episodes.size, dtype=torch.bool)
    return ShardResult(buffer.finish(everyone, torch.zeros(episodes.size)), log, events)
