"""Collect rollouts: complete episodes of the acting policy, computed in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.config.loading import compare_settings, load_settings
from esper.control.advice import append_advice
from esper.control.learned import LearnedController, PolicyOrigin, count_policy_features, open_policy, restore_policy
from esper.control.policy import Policy
from esper.control.rules import LookRule
from esper.engine.observation import make_mask_tensors
from esper.errors import ConfigError
from esper.lifecycle.actions import Head, make_wait_actions
from esper.numerics.devices import prepare_device
from esper.numerics.random_streams import Stream, numpy_generator
from esper.rl.episodes import CPU, Episodes
from esper.rl.rewards import assign_rewards, name_rewards
from esper.rl.rollout import Rollout, RolloutBuffer
from esper.runs.store import EventRow, encode_events
from esper.serialization.checkpoints import Checkpoints
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import make_evaluation_config
from esper.train.recorder import EpisodeLog, EpisodeRecorder
from esper.train.settings import TrainSettings
from esper.train.workers import DeviceTask, Shared, explain_device_errors


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
    """A shard's rollout, on the CPU, with its log and events."""

    rollout: Rollout
    log: EpisodeLog
    events: Sequence[EventRow]
    """The shard's events in order, with the times at which they happened."""
    baseline_steps: int = 0
    """Number of decisions in the episodes of the no-growth baseline, which only waits; the log omits them."""


def create_policy(settings: TrainSettings) -> Policy:
    """The untrained policy of a run."""
    spec = count_policy_features(settings.policy, settings.promise)
    return Policy(spec, settings.policy, torch.Generator().manual_seed(settings.seed), settings.rules.closed_heads)


def create_advisor(settings: TrainSettings, suite: Suite) -> LookRule | None:
    """The rule whose advice a run's policy observes on a suite; None without advice."""
    advice = settings.policy.advice
    return None if advice is None else LookRule(advice.rule, suite.steps)


def create_greedy_controller(policy: Policy, settings: TrainSettings) -> LearnedController:
    """A controller that takes the most probable actions of a run's policy, which must be on the CPU."""
    advisor = create_advisor(settings, get_suite(settings.suite))
    return LearnedController(policy, greedy=True, promise=settings.promise, advisor=advisor)


def load_start_policy(settings: TrainSettings, name: str) -> dict[str, Tensor]:
    """Weights and statistics of the policy from which a run starts: that of the run in the directory ``name``."""
    run = open_policy(name)
    origin = load_settings(PolicyOrigin, run.config)
    differences = [difference.key for difference in compare_settings(settings.policy, origin.policy)]
    if differences or settings.promise != origin.promise:
        raise ConfigError(
            f"start_from: the policy of {name} has other settings ({', '.join(differences) or 'conduct.promise'}): set "
            f"policy and conduct.promise as in {run.config}"
        )
    if untrained := origin.rules.closed_heads - settings.rules.closed_heads:
        heads = ", ".join(head.name.lower() for head in sorted(untrained))
        raise ConfigError(
            f"start_from: the policy of {name} has no head for {heads}, as its rules left one choice: set rules as in "
            f"{run.config}"
        )
    tensors = Checkpoints(run.checkpoints).latest().tensors
    return restore_policy(tensors, origin.policy, origin.promise, settings.rules).state_dict()


def check_start_policy(settings: TrainSettings) -> None:
    """Raise the errors of `load_start_policy`, before any file is created for a run that could not start."""
    if settings.start_from is not None:
        load_start_policy(settings, settings.start_from)


def sample_instances(settings: TrainSettings, iteration: int, shard: int) -> list[Instance]:
    """The training instances of a shard, one per environment; the environments of a group share an instance."""
    seed, group = settings.seed, settings.ppo.group
    suite, count = get_suite(settings.draw_suite(iteration, shard)), settings.environments // settings.shards // group
    if settings.mix:
        instances = suite.sample(count, "train", numpy_generator(seed, iteration, shard, Stream.TRAINING_INSTANCES))
    else:
        # Drawn for all shards together, so that families are balanced over shards.
        rng = numpy_generator(seed, iteration, Stream.TRAINING_INSTANCES)
        instances = suite.sample(settings.environments // group, "train", rng)[shard * count : (shard + 1) * count]
    return [instance for instance in instances for _ in range(group)]


@explain_device_errors()
def collect_rollout(task: ShardTask) -> ShardResult:
    """Run a shard's episodes to their end, and those of the no-growth baseline if there is one."""
    settings, iteration, group = task.settings, task.iteration, task.settings.ppo.group
    suite_name = settings.draw_suite(iteration, task.shard)
    suite, size = get_suite(suite_name), settings.environments // settings.shards
    first = task.shard * size

    # The acting policy of this iteration.
    policy = create_policy(settings)
    policy.load_state_dict(dict(task.weights.get()))
    policy.to(prepare_device(task.device, deterministic=settings.deterministic))

    # The episodes, each with the reward settings of its environment.
    instances = sample_instances(settings, iteration, task.shard)
    modes = [reward.at_progress(iteration / settings.iterations) for reward in settings.reward]
    rewards = assign_rewards(modes, settings.environments, group)[first : first + size]
    config = replace(make_evaluation_config(settings, task.device), suite=suite_name)
    episodes = config.with_promise(settings.promise).create_episodes(instances, rewards=rewards)

    # Events are recorded only on the run's own suite: readers could not name slots and blueprints of other suites.
    recorder = EpisodeRecorder(episodes)
    if suite.name == settings.suite:
        number, telemetry = iteration + 1, settings.telemetry
        records_steps = telemetry.records_steps(number)
        recorder = EpisodeRecorder(
            episodes,
            number,
            events="steps" if records_steps else "changes",
            rewards=assign_rewards(name_rewards(settings.reward), settings.environments, group)[first : first + size],
            first_environment=first,
            watched=telemetry.select_watched(settings.environments) if records_steps else (),
        )

    # Uniform numbers [T, E, 8] decide the actions; those of an environment do not depend on its shard.
    streams = [numpy_generator(settings.seed, iteration, first + row, Stream.ACTIONS) for row in range(size)]
    noise = np.stack([stream.random((suite.steps, len(Head))) for stream in streams], axis=1)
    advisor = create_advisor(settings, suite)
    result = run_policy(policy, advisor, episodes, torch.from_numpy(noise).float(), recorder)
    if not settings.ppo.no_growth_baseline:
        return result

    # The baseline is a separate population, with one network per group that only waits. So the numbers of the episodes
    # above are bitwise the same with and without it.
    waiting = config.with_promise(None).create_episodes(instances[::group], rewards=rewards[::group])
    steps = [waiting.step(make_wait_actions(waiting.size)) for _ in range(suite.steps)]
    baseline_rewards = torch.from_numpy(np.stack([step.reward for step in steps])).float()
    rollout = result.rollout._replace(control_variate=baseline_rewards.repeat_interleave(group, 1))
    return replace(result, rollout=rollout, baseline_steps=sum(int(step.running.sum()) for step in steps))


def run_policy(
    policy: Policy, advisor: LookRule | None, episodes: Episodes, noise: Tensor, recorder: EpisodeRecorder
) -> ShardResult:
    """Let the policy act, with uniform numbers ``noise [T, E, 8]``, until all episodes end."""
    device, state = policy.device, policy.initial_state(episodes.size)
    buffer = RolloutBuffer(state.to(CPU))
    events = encode_events(recorder.record_start())
    for uniforms in noise.to(device, non_blocking=True):
        # Observe and decide. Networks are observed on the CPU, and the policy acts on its device.
        observation, legal = episodes.observe(), episodes.legal_actions()
        observation = observation if advisor is None else append_advice(advisor, observation, legal)
        masks = make_mask_tensors(legal, CPU)
        step = policy.act(observation.to(device), masks.to(device), state, uniforms).to_cpu()
        actions = step.actions.numpy()
        events += encode_events(recorder.record_observation(observation, step))

        # Train and measure, and keep what the update, the iteration's figures and the events need.
        result = episodes.step(actions)
        reward, running = torch.from_numpy(result.reward).float(), torch.from_numpy(result.running)
        buffer.add(observation, masks, step, reward, running)
        events += encode_events(recorder.record_step(actions, result, step))
        state = step.state
    terminated = torch.ones(episodes.size, dtype=torch.bool)
    return ShardResult(buffer.finish(terminated, torch.zeros(episodes.size)), recorder.finish(), events)
