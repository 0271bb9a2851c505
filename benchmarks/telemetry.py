"""What it costs to keep events.

    python benchmarks/telemetry.py [--seconds 3] [--iterations 5] [--environments 32]

How many events a second a run store takes while another process follows it, and their share of the CPU time of a
training in this process, where a worker process would add sending them with its result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config.loading import load_settings
from esper.control.policy import PolicyStep
from esper.engine.observation import Observation
from esper.errors import RunError
from esper.lifecycle.actions import Head
from esper.rl.episodes import Episodes, StepResult
from esper.rl.ppo import PPO
from esper.rl.rollout import concatenate_rollouts
from esper.runs.events import Event, StepTaken
from esper.runs.reader import RunReader
from esper.runs.store import RunStore, encode_events
from esper.tasks.registry import get_suite
from esper.train.evaluation import make_evaluation_config
from esper.train.iteration import Iteration, compute_figures, record_iteration
from esper.train.recorder import EpisodeRecorder
from esper.train.settings import TrainSettings
from esper.train.trainer import create_advisor, create_policy, run_policy, sample_instances
from esper.train.workers import prepare_process

AT_ONCE = 64
"""Events that are emitted together: a step of the default population."""


@dataclass
class Lap:
    """CPU seconds of an iteration of training, and what it told."""

    telemetry: float = 0.0
    """For making, encoding, handing over and committing events."""
    total: float = 0.0
    events: int = 0
    steps: int = 0
    """Decisions of one network."""


def measure_rate(seconds: float) -> tuple[float, float]:
    """Events a second that were committed, and that another process, following, had read and decoded in order.

    Raises:
        RunError: the follower missed an event, or saw one out of order.
    """
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, RunStore.create(Path(folder) / "run.db") as store:
        ours, theirs = context.Pipe()
        follower = context.Process(target=follow, args=(store.path, theirs), daemon=True)
        follower.start()
        ours.recv()  # it has opened the store
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            store.append(encode_events(step_events(count)))
            count += AT_ONCE
        store.flush()
        written = time.perf_counter() - began
        ours.send(count)
        fault = ours.recv()
        followed = time.perf_counter() - began
        follower.join()
    if fault is not None:
        raise RunError(f"a follower of the run store was told wrongly: {fault}")
    return count / written, count / followed


def step_events(first: int) -> Iterator[StepTaken]:
    """A decision of each network; ``step`` counts events from ``first``."""
    for number in range(AT_ONCE):
        yield StepTaken(
            iteration=1,
            episode=1,
            environment=number,
            step=first + number,
            op="germinate",
            loss=1.40388,
            metric=0.46562,
            objective=0.43021,
            added=0.35411,
            stages=("blending", "fossilized", "germinated", "dormant"),
            blueprints=("attention", "token_mix", "norm", None),
            alphas=(0.66667, 1.0, 0.0, 0.0),
            contributions=(0.01562, 0.10938, -0.00781, None),
            gradient_ratios=(0.7312, 1.204, 0.08125, None),
            vanished_shares=(0.0, 0.0, 0.0625, None),
            exploded_shares=(0.0, 0.0, 0.0, None),
            slot=2,
            blueprint="norm",
            choices={"blend": "add", "tempo": "3", "alpha_target": "1.0"},
            value=0.01359,
            log_prob=-4.74625,
            reward=0.00562,
            terms={"objective": 0.00662, "intervention": -0.001},
            train_loss=1.46083,
        )


def follow(path: Path, connection: Connection[Any, Any]) -> None:
    """Read a store until as many events are there as the connection says; answer with what was wrong, or None."""
    seen, last, wanted, fault = 0, 0, None, None
    with RunReader.open(path) as reader:
        connection.send("ready")
        while wanted is None or (seen < wanted and fault is None):
            for record in reader.records(last):
                event = reader.decode(record)
                if not isinstance(event, StepTaken) or event.step != seen:
                    fault = fault or f"instead of event {seen} came {event}"
                seen, last = seen + 1, record.id
            if wanted is None and connection.poll():
                wanted = connection.recv()
    connection.send(fault if fault or seen == wanted else f"{seen} events came of {wanted}")


class TimedRecorder(EpisodeRecorder):
    """Counts the CPU time in which its events are made and, as whoever takes them does it one by one, encoded."""

    def __init__(self, episodes: Episodes, iteration: int, *, watched: range) -> None:
        super().__init__(episodes, iteration, events="steps", watched=watched)
        self.seconds = 0.0

    def record_start(self) -> Iterator[Event]:
        return self._timed(super().record_start())

    def record_observation(self, observation: Observation, step: PolicyStep) -> Iterator[Event]:
        return self._timed(super().record_observation(observation, step))

    def record_step(
        self, actions: NDArray[np.int64], result: StepResult, policy: PolicyStep | None = None
    ) -> Iterator[Event]:
        began = time.thread_time()
        events = super().record_step(actions, result, policy)
        self.seconds += time.thread_time() - began
        return self._timed(iter(events))

    def _timed(self, events: Iterator[Event]) -> Iterator[Event]:
        began = time.thread_time()
        yield from events
        self.seconds += time.thread_time() - began


def measure_training(settings: TrainSettings) -> list[Lap]:
    """Train for the settings' iterations in this process, in one shard, and look at each."""
    prepare_process()
    learner = PPO(create_policy(settings), settings.ppo, settings.seed)
    with TemporaryDirectory() as folder, RunStore.create(Path(folder) / "run.db") as store:
        return [measure_iteration(settings, learner, store, number) for number in range(settings.iterations)]


def measure_iteration(settings: TrainSettings, learner: PPO, store: RunStore, number: int) -> Lap:
    lap, began, committed = Lap(), time.process_time(), store.thread_seconds

    suite, size = get_suite(settings.suite), settings.environments
    rewards = [settings.reward[0].at_progress(0.0)] * size
    instances = sample_instances(settings, number, 0)
    config = make_evaluation_config(settings).with_promise(settings.promise)
    episodes = config.create_episodes(instances, rewards=rewards)
    recorder = TimedRecorder(episodes, number + 1, watched=settings.telemetry.select_watched(size))
    generator = torch.Generator().manual_seed(number)
    noise = torch.rand(suite.steps, size, len(Head), generator=generator)
    shard = run_policy(learner.policy, create_advisor(settings, suite), episodes, noise, recorder)
    start = time.thread_time()
    store.append(shard.events)
    lap.telemetry += time.thread_time() - start
    lap.events = len(shard.events)
    update = learner.update(concatenate_rollouts([shard.rollout]), number / settings.iterations)
    steps = int(np.sum(shard.log.running)) + shard.baseline_steps
    figures = compute_figures(settings, [shard.log], steps, update, None, 0.0)
    start = time.thread_time()
    record_iteration(store, Iteration(number + 1, settings.iterations, figures), {})
    lap.telemetry += time.thread_time() - start + recorder.seconds + store.thread_seconds - committed
    lap.total = time.process_time() - began
    lap.steps = int(figures["environment_steps"])
    return lap


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0, help="for how long the store is written")
    parser.add_argument("--iterations", type=int, default=5, help="of training; figures are medians over them")
    parser.add_argument("--environments", type=int, default=32, help="a multiple of the default group of 8")
    asked = parser.parse_args()
    written, followed = measure_rate(asked.seconds)
    sys.stdout.write(f"events of four slots: {written:.0f}/s committed, {followed:.0f}/s followed\n")
    overrides = (f"iterations={asked.iterations}", f"environments={asked.environments}", "shards=1")
    laps = measure_training(load_settings(TrainSettings, None, overrides))
    sys.stdout.write(
        f"telemetry takes {median(lap.telemetry / lap.total for lap in laps):.2%} of the CPU time of training: "
        f"{median(lap.events / lap.steps for lap in laps):.2f} events per environment step, "
        f"{median(lap.telemetry / lap.events * 1e6 for lap in laps):.0f} microseconds each\n"
    )


if __name__ == "__main__":
    main()
