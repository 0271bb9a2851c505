"""What it costs to keep events.

How many a second a run store takes while somebody follows it, and their share of a training run's CPU time.
"""

from __future__ import annotations

import multiprocessing
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

from esper.control.observation import Observation
from esper.control.policy import PolicyStep
from esper.errors import RunError
from esper.experiments.chronicle import Chronicle, Scope
from esper.experiments.collect import instances_of, joined, new_policy, run_policy
from esper.experiments.crew import exhausted
from esper.experiments.iteration import record, summarised
from esper.experiments.play import terms_of
from esper.experiments.process import prepare_process
from esper.experiments.settings import TrainSettings
from esper.lifecycle.actions import Head
from esper.rl.episodes import Episodes, StepResult
from esper.rl.ppo import Learner
from esper.tasks.registry import get_suite
from esper.telemetry.events import Event, StepTaken
from esper.telemetry.reader import RunReader
from esper.telemetry.store import EventRow, RunStore, as_rows

AT_ONCE = 64
"""Events that are emitted together: a step of the default population."""
_SLOTS = 4


@dataclass(frozen=True)
class RateResult:
    """What went through a store that was written as fast as it goes."""

    events: int
    written: float
    """Events that were encoded and committed per second."""
    followed: float
    """Per second until another process had read and decoded the last one, all of them and in order."""


@dataclass(frozen=True)
class ShareResult:
    """What telemetry took of a training run, medians over its iterations."""

    share: float
    """CPU time for making, encoding, handing over and committing events, over that of the whole process."""
    microseconds: float
    """The same per event."""
    committing: float
    """Microseconds per event of these that the committing thread took."""
    events_per_step: float
    """Events per decision of a network."""
    shares: list[float]
    """Of each iteration."""


def measure_rate(seconds: float) -> RateResult:
    """Write events of populations with four slots for so long, while another process follows.

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
            store.append(as_rows(step_events(count)))
            count += AT_ONCE
        store.flush()
        written = time.perf_counter() - began
        ours.send(count)
        fault = ours.recv()
        followed = time.perf_counter() - began
        follower.join()
    if fault is not None:
        raise RunError(f"a follower of the run store was told wrongly: {fault}")
    return RateResult(count, count / written, count / followed)


def step_events(first: int) -> Iterator[StepTaken]:
    """A decision of each network; ``step`` counts events from ``first``."""
    for number in range(AT_ONCE):
        yield StepTaken(
            1,
            1,
            number,
            first + number,
            "germinate",
            loss=1.40388,
            accuracy=0.46562,
            objective=0.43021,
            added=0.35411,
            stages=("blending", "fossilized", "germinated", "dormant"),
            blueprints=("attention", "token_mix", "norm", None),
            alphas=(0.66667, 1.0, 0.0, 0.0),
            contributions=(0.01562, 0.10938, -0.00781, None),
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
            for stored in reader.stored_events(last):
                if not isinstance(stored.event, StepTaken) or stored.event.step != seen:
                    fault = fault or f"instead of event {seen} came {stored.event}"
                seen, last = seen + 1, stored.id
            if wanted is None and connection.poll():
                wanted = connection.recv()
    connection.send(fault if fault or seen == wanted else f"{seen} events came of {wanted}")


class TimedChronicle(Chronicle):
    """Counts the CPU time in which its events are made and, as whoever takes them does it one by one, encoded."""

    def __init__(self, episodes: Episodes, scope: Scope) -> None:
        super().__init__(episodes, scope)
        self.seconds = 0.0

    def started(self) -> Iterator[Event]:
        return self._timed(super().started())

    def looked(self, observation: Observation, step: PolicyStep) -> Iterator[Event]:
        return self._timed(super().looked(observation, step))

    def stepped(self, actions: NDArray[np.int64], result: StepResult, policy: PolicyStep | None) -> Iterator[Event]:
        return self._timed(super().stepped(actions, result, policy))

    def _timed(self, events: Iterator[Event]) -> Iterator[Event]:
        began = time.thread_time()
        yield from events
        self.seconds += time.thread_time() - began


def measure_share(settings: TrainSettings) -> ShareResult:
    """Train for the settings' iterations in this process, in one shard, and look at each.

    A worker process would add sending its events through a pipe, and take as much from the commits' process.
    """
    prepare_process()
    learner = Learner(new_policy(settings), settings.ppo, settings.seed)
    with TemporaryDirectory() as folder, RunStore.create(Path(folder) / "run.db") as store:
        laps = [_iteration(settings, learner, store, number) for number in range(settings.iterations)]
    return ShareResult(
        median(lap.telemetry / lap.total for lap in laps),
        median(lap.telemetry / lap.events * 1e6 for lap in laps),
        median(lap.committing / lap.events * 1e6 for lap in laps),
        median(lap.events / lap.steps for lap in laps),
        [lap.telemetry / lap.total for lap in laps],
    )


@dataclass
class _Lap:
    """CPU seconds of an iteration, and what it told."""

    telemetry: float = 0.0
    committing: float = 0.0
    total: float = 0.0
    events: int = 0
    steps: int = 0


def _iteration(settings: TrainSettings, learner: Learner, store: RunStore, number: int) -> _Lap:
    lap, began, committed = _Lap(), time.process_time(), store.thread_seconds

    def hear(told: list[EventRow]) -> None:
        start = time.thread_time()
        store.append(told)
        lap.telemetry += time.thread_time() - start
        lap.events += len(told)

    suite, size = get_suite(settings.suite), settings.environments
    rewards = [settings.reward[0].at(0.0)] * size
    instances = instances_of(settings, number)
    episodes = terms_of(settings).episodes(instances, rewards=rewards)
    chronicle = TimedChronicle(episodes, Scope(number + 1, 0, True, settings.telemetry.watched_of(size)))
    generator = torch.Generator().manual_seed(number)
    noise = torch.rand(suite.steps, size, len(Head), generator=generator)
    shard = exhausted(run_policy(learner.policy, episodes, noise, chronicle), hear)
    update = learner.update(joined([shard.rollout]), number / settings.iterations)
    result = summarised(settings, number + 1, [shard], (update,), None, 0.0)
    start = time.thread_time()
    record(store, result, {})
    lap.committing = store.thread_seconds - committed
    lap.telemetry += time.thread_time() - start + chronicle.seconds + lap.committing
    lap.total = time.process_time() - began
    lap.steps = result.environment_steps
    return lap
