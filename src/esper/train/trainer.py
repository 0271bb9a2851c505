"""Train a growth controller: collect, update, record, write a checkpoint, repeat."""

import copy
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from esper.config.loading import compare_settings, dump_settings, load_settings, put_value, validate_settings
from esper.control.advice import append_advice
from esper.control.learned import (
    POLICY,
    UNTRAINED,
    LearnedController,
    PolicyOrigin,
    count_policy_features,
    open_policy,
    restore_policy,
)
from esper.control.policy import Policy
from esper.control.rules import LookRule
from esper.engine.observation import make_mask_tensors
from esper.errors import ConfigError, DivergedError, EsperError, RunError
from esper.lifecycle.actions import Head, make_wait_actions
from esper.numerics.devices import describe_platform, prepare_device, require_device
from esper.numerics.random_streams import Stream, numpy_generator
from esper.rl.episodes import CPU, Episodes
from esper.rl.ppo import PPO, require_bf16
from esper.rl.rewards import name_rewards
from esper.rl.rollout import Rollout, RolloutBuffer, concatenate_by_shape
from esper.runs.events import (
    CheckpointWritten,
    InteractionsMeasured,
    RunEnded,
    RunExtended,
    RunFailed,
    RunInterrupted,
    RunResumed,
    RunStarted,
)
from esper.runs.run_directory import RunDirectory, RunState, read_state
from esper.runs.store import EventRow, RunStore, encode_events
from esper.serialization import Checkpoint, Checkpoints
from esper.signals import Interrupts, Terminated
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.tasks.suite_files import allow_files
from esper.train.evaluation import compute_mean_score, create_baselines, evaluate_controllers, make_evaluation_config
from esper.train.iteration import (
    LEVELS,
    Iteration,
    TrainingSummary,
    UpdateHistory,
    compute_figures,
    extend_history,
    find_anomalies,
    history_from_state,
    history_to_state,
    record_iteration,
    scale_rate,
    summarise_run,
    was_alarmed,
)
from esper.train.recorder import EpisodeLog, EpisodeRecorder, describe_run, record_interactions
from esper.train.settings import TrainSettings
from esper.train.workers import LOCAL, DeviceTask, Shared, Workers, explain_device_errors, require_devices

# Rollouts: complete episodes of the acting policy, computed in shards


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


def create_controller(
    policy: Policy, settings: TrainSettings, name: str = POLICY, *, greedy: bool = True
) -> LearnedController:
    """A controller that takes the most probable actions of a run's policy, or draws them; the policy is on the CPU."""
    advisor = create_advisor(settings, get_suite(settings.suite))
    return LearnedController(policy, greedy=greedy, promise=settings.promise, advisor=advisor, name=name)


def load_start_policy(settings: TrainSettings, name: str) -> dict[str, Tensor]:
    """Weights and statistics of the policy from which a run starts: that of the run in the directory ``name``."""
    run = open_policy(name)
    origin = load_settings(PolicyOrigin, run.config)
    differences = [difference.key for difference in compare_settings(settings.policy, origin.policy)]
    if differences or settings.promise != origin.promise:
        raise ConfigError(
            f"start_from: the policy of {name} has other settings ({', '.join(differences) or 'growth.promise'}): set "
            f"policy and growth.promise as in {run.config}"
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

    # The episodes.
    instances = sample_instances(settings, iteration, task.shard)
    rewards = [settings.reward[0].at_progress(iteration / settings.iterations)] * size
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
            rewards=name_rewards(settings.reward) * size,
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

    # The baseline is a population of its own, so the episodes above are bitwise the same without it.
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


# Training


class Trainer:
    """Trains a controller in a run directory. The newest checkpoint has everything that is needed to continue."""

    def __init__(self, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: Workers) -> None:
        self.run = run
        self.settings = settings
        self.store = store
        require_devices(settings.devices, workers)
        self._device = prepare_device(settings.devices[0], deterministic=settings.deterministic)
        self.policy: Policy = create_policy(settings).to(self._device)
        self.learner = PPO(self.policy, settings.ppo, settings.seed)
        self.done = 0
        self._updates: UpdateHistory = ()
        self._workers = workers
        self._checkpoints = Checkpoints(run.checkpoints, settings.keep_checkpoints)
        self._saved: int | None = None
        """Iteration of the newest checkpoint."""
        rng = numpy_generator(settings.seed, Stream.PROBE_INSTANCES)
        self._probes = get_suite(settings.suite).sample(settings.probe_instances, "train", rng)

    @classmethod
    def open(cls, run: RunDirectory, settings: TrainSettings, store: RunStore, workers: Workers) -> Self:
        """Resume a run from its newest checkpoint, or start it with a checkpoint of the untrained policy."""
        trainer = cls(run, settings, store, workers)
        platform = describe_platform(set(settings.devices))

        # If a store has iterations, there was a checkpoint. If it was removed, fail instead of starting over.
        if trainer._checkpoints.iterations() or store.last_iteration():
            checkpoint = trainer._checkpoints.latest()
            trainer._updates = history_from_state(checkpoint.state)
            trainer.learner.load_state_tensors(checkpoint.tensors)
            trainer.done = trainer._saved = checkpoint.iteration
            store.rewind(trainer.done)
            # If the process was killed at the wrong moment, the checkpoint may lack its event.
            if all(event.iteration != trainer.done for event in store.events(CheckpointWritten)):
                trainer._record_checkpoint(checkpoint)
            # A complete run is not resumed, because there is nothing to do.
            if trainer.done < settings.iterations:
                store.emit(RunResumed(iteration=trainer.done, platform=platform))
        else:
            if settings.start_from is not None:
                trainer.policy.load_state_dict(load_start_policy(settings, settings.start_from))
            store.set_metadata(describe_run(settings))
            store.emit(RunStarted(iteration=0, platform=platform, seed=settings.seed))
            store.flush()
            trainer._save_checkpoint()
        return trainer

    def measure_baseline_levels(self) -> dict[str, float]:
        """The mean test score of each baseline and of the untrained policy on the probe instances; once per run.

        The untrained policy's score is also the first point of the learning curve, unless the run starts from a policy.
        """
        levels = self.store.metadata().get(LEVELS)
        if levels is None:
            settings = self.settings
            untrained = create_controller(create_policy(settings), settings, UNTRAINED)
            controllers = [*create_baselines(get_suite(settings.suite)), untrained]
            results = evaluate_controllers(self._workers, controllers, make_evaluation_config(settings), self._probes)
            scores = map(compute_mean_score, results)
            levels = {controller.name: score for controller, score in zip(controllers, scores, strict=True)}
            self.store.set_metadata({LEVELS: levels})
            if settings.start_from is None:
                self.store.record_scalars(0, {"probe_score": levels[UNTRAINED]})
                self.store.flush()
        return levels

    def train(self, report: Callable[[Iteration], None]) -> None:
        """Train for the remaining iterations; ``report`` is called after each.

        Ctrl-C and SIGTERM abandon a running rollout or probe, which can be repeated, but wait for an update and for
        files to be written. They are raised once the last complete iteration has a checkpoint.
        """
        settings, began = self.settings, time.perf_counter()
        with Interrupts() as interrupts:
            try:
                while self.done < settings.iterations:
                    iteration_began = time.perf_counter()
                    before = self.done, self._updates, self.learner.state_tensors()
                    try:
                        # Rollouts: complete episodes of the acting policy. A shard's events are stored when it ends.
                        weights = {name: value.cpu() for name, value in self.policy.state_dict().items()}
                        shared = self._workers.share(weights)
                        tasks = [ShardTask(settings, self.done, shard, shared) for shard in range(settings.shards)]
                        results: dict[int, ShardResult] = {}
                        with interrupts.interruptible():
                            for number, shard in self._workers.as_completed(collect_rollout, tasks):
                                self.store.append(shard.events)
                                results[number] = shard
                        shards = [results[number] for number in range(settings.shards)]

                        # The update, from one rollout per suite.
                        rollouts = concatenate_by_shape([shard.rollout for shard in shards])
                        rollout, *others = (rollout.to(self._device) for rollout in rollouts)
                        # After an anomaly, record all figures of minibatches for some iterations.
                        full = settings.telemetry.minibatches_after_anomaly
                        minibatches: list[dict[str, float]] = []
                        update = self.learner.update(
                            rollout,
                            self.done / settings.iterations,
                            *others,
                            rate_scale=scale_rate(self._updates),
                            record=minibatches if was_alarmed(self._updates, settings.ppo.target_kl, full) else None,
                        )
                        anomalies = find_anomalies(extend_history(self._updates, update), settings.ppo.target_kl)
                        # Undo a harmful update, if the settings require it.
                        if settings.ppo.on_anomaly == "skip" and any(alarm.anomaly.harms for alarm in anomalies):
                            self.learner.load_state_tensors(before[2])
                            update = {**update, "skipped": 1.0}
                        self._updates = extend_history(self._updates, update)
                        self.done += 1

                        # Every few iterations, a copy of the greedy policy on the CPU, where controllers decide, runs
                        # on the probes. The kept modules get Shapley values, alone and in pairs.
                        probe_score: float | None = None
                        interactions: list[InteractionsMeasured] = []
                        if self.done % settings.probe_every == 0 or self.done == settings.iterations:
                            controller = create_controller(copy.deepcopy(self.policy).cpu(), settings)
                            config = make_evaluation_config(settings)
                            with interrupts.interruptible():
                                (probed,) = evaluate_controllers(
                                    self._workers, [controller], config, self._probes, shapley="pairs"
                                )
                            probe_score = compute_mean_score(probed)
                            interactions = record_interactions(self.done, get_suite(settings.suite), probed.earnings)

                        seconds = time.perf_counter() - iteration_began
                        logs = [shard.log for shard in shards]
                        steps = sum(int(np.sum(shard.log.running)) + shard.baseline_steps for shard in shards)
                        figures = compute_figures(settings, logs, steps, update, probe_score, seconds)
                        # Only a harmful update is undone.
                        kept = settings.ppo.on_anomaly == "skip" and not update["skipped"]
                        response = "record" if kept else settings.ppo.on_anomaly
                        iteration = Iteration(
                            self.done, settings.iterations, figures, anomalies, response, minibatches, interactions
                        )
                        record_iteration(self.store, iteration, self.store.metadata().get(LEVELS, {}))
                    except (KeyboardInterrupt, Terminated):
                        # Undo the update of an abandoned iteration.
                        self.done, self._updates, tensors = before
                        self.learner.load_state_tensors(tensors)
                        raise
                    report(iteration)

                    # Save what is done before raising any pending Ctrl-C or SIGTERM.
                    stops = settings.ppo.on_anomaly == "stop" and bool(iteration.anomalies)
                    if stops or self.done == settings.iterations or self.done % settings.checkpoint_every == 0:
                        self._save_checkpoint()
                    if stops:
                        sentences = "; ".join(f"{one.label}: {one.describe()}" for one in iteration.anomalies)
                        raise DivergedError(
                            f"ppo.on_anomaly is stop, and iteration {self.done} had an anomaly: {sentences}. "
                            "The iteration is saved; continue with esper train --resume"
                        )
                    if self.done < settings.iterations:
                        interrupts.raise_if_requested()
            except (KeyboardInterrupt, Terminated) as stop:
                if self._saved != self.done:
                    self._save_checkpoint()
                reason = "SIGTERM" if isinstance(stop, Terminated) else "Ctrl-C"
                self.store.emit(RunInterrupted(iteration=self.done, reason=reason))
                self.store.flush()
                raise
            except EsperError as error:
                self.store.emit(RunFailed(iteration=self.done, reason=str(error)))
                with suppress(RunError):  # the store itself may have failed
                    self.store.flush()
                raise
        # A complete run lacks its final event if it was killed after its last checkpoint.
        if read_state(self.run, self.store) is not RunState.FINISHED:
            self.store.emit(RunEnded(iteration=self.done, seconds=time.perf_counter() - began))
            self.store.flush()

    def _save_checkpoint(self) -> None:
        saved = self._checkpoints.save(self.done, self.learner.state_tensors(), history_to_state(self._updates))
        self._saved = self.done
        self._record_checkpoint(saved)
        self.store.flush()

    def _record_checkpoint(self, checkpoint: Checkpoint) -> None:
        file = str(checkpoint.path.relative_to(self.run.path))
        self.store.emit(CheckpointWritten(iteration=checkpoint.iteration, file=file, sha256=checkpoint.sha256))


def build_settings(settings: TrainSettings | Mapping[str, Any]) -> TrainSettings:
    """Settings from a mapping of those that differ from the defaults, whose keys may be dotted."""
    if isinstance(settings, TrainSettings):
        return settings
    if not isinstance(cast(object, settings), Mapping):
        raise ConfigError(f"settings are a {type(settings).__name__}: give a mapping, or TrainSettings")
    allow_files([f"{key}={value}" for key, value in settings.items()])  # whoever calls this has named them
    values: dict[str, Any] = {}
    for key, value in settings.items():
        put_value(TrainSettings, values, key, value, f"setting {key}")
    return validate_settings(TrainSettings, values, lambda _: "")


def extend_run(run: RunDirectory, overrides: Sequence[str]) -> None:
    """Give a run, also a finished one, the number of iterations in ``overrides``; `train_controller` then goes on.

    No other setting may change. Rates and rewards that follow a schedule are those of a run of the new length.
    """
    with run.locked(run.command):
        before = load_settings(TrainSettings, run.config)
        names = {override.partition("=")[0] for override in overrides}
        after = load_settings(TrainSettings, run.config, overrides if names == {"iterations"} else ())
        if names != {"iterations"} or after.iterations < before.iterations:
            raise ConfigError(
                f"--resume uses the run's own settings, of which only iterations may become more ({before.iterations} "
                "so far): remove the other changes"
            )
        if after.iterations > before.iterations:
            with run.open_store() as store:
                record = RunExtended(iteration=store.last_iteration(), before=before.iterations, after=after.iterations)
                store.emit(record)
                store.set_metadata({"iterations": after.iterations})
                store.flush()
            dump_settings(after, run.config)


def train_controller(
    settings: TrainSettings | Mapping[str, Any],
    run_dir: str | os.PathLike[str],
    *,
    workers: Workers | None = None,
    watch: Callable[[Trainer], AbstractContextManager[Callable[[Iteration], None]]] | None = None,
) -> TrainingSummary:
    """Train a growth controller in a run directory, as `esper train` does.

    ```python
    summary = esper.train_controller({"suite": "tokens", "iterations": 20, "ppo.clip": 0.1}, "runs/mine")
    print(summary.probe_score, summary.baselines)
    ```

    If the directory has a run with the same settings, training continues from its newest checkpoint; a finished run is
    only read. Call it in the main thread, which gets one thread of torch; after Ctrl-C the last complete iteration is
    saved.

    Args:
        settings: The settings, or a mapping of those that differ from the defaults; keys may be dotted.
        run_dir: A new or empty directory, or that of a run with these settings.
        workers: Where rollouts are computed; None: in processes of this machine, at most one per core.
        watch: Called with the `Trainer` before it trains; returns a context manager around the training, whose value is
            called with each `Iteration`. What it raises ends the training. None: measure the baselines first, silently.

    Returns:
        The figures of the run so far.
    """
    settings = build_settings(settings)
    # All that can be refused is refused before there is a directory.
    run = RunDirectory(Path(run_dir))
    new = not os.path.isfile(run.config)  # unlike Path.is_file, it takes names that no file can have
    if new:
        check_start_policy(settings)
        require_bf16(settings.ppo, require_device(settings.devices[0]))
        run = RunDirectory.create(run.path)
    with (
        run.locked(run.command),
        LOCAL.open_workers(settings.shards) if workers is None else nullcontext(workers) as computing,
    ):
        # Checked again under the lock: another process may have started a run here meanwhile.
        if new:
            run.require_empty()
            dump_settings(settings, run.config)
        elif load_settings(TrainSettings, run.config) != settings:
            raise ConfigError(f"{run.path} was trained with other settings: choose another directory")
        with run.open_store() as store:
            trainer = Trainer.open(run, settings, store, computing)
            with (watch or _measure_baselines)(trainer) as report:
                trainer.train(report)
            return summarise_run(store)


@contextmanager
def _measure_baselines(trainer: Trainer) -> Generator[Callable[[Iteration], None]]:
    trainer.measure_baseline_levels()
    yield lambda _: None
