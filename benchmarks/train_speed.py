"""How fast controllers train: environment steps per second in this process and one thread, and where the time goes.

    python benchmarks/train_speed.py [--iterations 3] [--json] [environments=128] [KEY=VALUE ...]

Settings are those of `esper train --set`. After the measured iterations, one more is profiled, and operations of torch
are counted in some decisions. The profiler itself slows parts with many small calls the most.
"""

from __future__ import annotations

import argparse
import cProfile
import inspect
import json
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import FunctionType
from typing import Any, Protocol, cast

import torch
from torch.profiler import ProfilerActivity, profile

from esper.config.loading import load_settings
from esper.control.advice import append_advice
from esper.control.policy import Policy
from esper.engine.observation import make_mask_tensors, observe
from esper.lifecycle.actions import Head
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.evaluation import evaluate_committed, start_evaluation
from esper.population.learning import TrainingStream, clip_by_network, optimizer_step, start_training
from esper.population.population import Population
from esper.population.promise import PromiseMeter
from esper.rl.episodes import CPU, Episodes
from esper.rl.ppo import PPO
from esper.rl.rewards import RewardTracker
from esper.rl.rollout import concatenate_rollouts
from esper.runs.store import encode_events
from esper.tasks.registry import get_suite
from esper.train.evaluation import make_evaluation_config
from esper.train.settings import TrainSettings
from esper.train.trainer import ShardTask, collect_rollout, create_advisor, create_policy, sample_instances
from esper.train.workers import Shared, prepare_process

PARTS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "hosts and seeds": (start_training,),
    "optimizers": (optimizer_step, clip_by_network),
    "validation and counterfactuals": (start_evaluation, evaluate_committed),
    "what blueprints promise": (PromiseMeter.measure,),
    "minibatches": (TrainingStream.draw_batches,),
    "lifecycle": (Population.decide, Episodes.legal_actions),
    "rewards": (RewardTracker.record,),
    "observations": (observe,),
    "policy": (Policy.act,),
    "events": (encode_events,),
    "update": (PPO.update,),
}
"""The functions of each part. Optimizers are called within training, and their time is subtracted from it."""
REST = "rest"
DECISIONS_BEFORE, DECISIONS_COUNTED = 8, 8
"""Operations are counted after the first 8 decisions of an episode, over the next 8: seeds exist by then, and promises
are measured once in eight decisions. Shorter episodes are counted in their second half."""

# fmt: off
_WITHOUT_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        "_has_compatible_shallow_copy_type", "_reshape_alias", "_unsafe_view", "_version", "alias", "as_strided",
        "as_strided_", "broadcast_tensors", "chunk", "conj", "contiguous", "data", "detach", "detach_", "diagonal",
        "empty", "empty_like", "empty_strided", "expand", "expand_as", "flatten", "is_same_size", "item", "lift",
        "lift_fresh", "mT", "movedim", "narrow", "new_empty", "new_empty_strided", "numel", "numpy_T", "permute",
        "requires_grad_", "reshape", "resize_", "resize_as_", "resolve_conj", "resolve_neg", "result_type", "select",
        "set_", "size", "slice", "split", "split_with_sizes", "squeeze", "stride", "swapaxes", "t", "tensor_split",
        "to", "transpose", "unbind", "unflatten", "unfold", "unsafe_split", "unsqueeze", "view", "view_as",
    )
)
# fmt: on
"""Operations that return a view, allocate or inspect shapes. If they copy, another operation inside them does it."""


@dataclass(frozen=True)
class TrainBenchmark:
    """The speed of training a controller."""

    env_steps_per_second: float
    """Decisions of all networks per second of wall time, including updates; the median over iterations, without the
    profiler."""
    iterations: list[float]
    """Environment steps per second of each iteration."""
    share: dict[str, float]
    """Each part's fraction of the time of one more iteration under the profiler. The profiler itself slows parts with
    many small calls the most."""
    operations_per_decision: float
    """Number of operations that would launch a kernel on a GPU, for one decision of all networks of a shard with its
    training and measurements, without the update of the policy."""
    operations: dict[str, float]
    """The same number by operation of torch, most frequent first."""


def measure_training(settings: TrainSettings, report: Callable[[int, float], None]) -> TrainBenchmark:
    """Train for the settings' iterations and profile one more.

    ``report`` is called with each iteration and its steps per second. If there are several iterations, the first is a
    warm-up and not counted.
    """
    prepare_process()
    learner = PPO(create_policy(settings), settings.ppo, settings.seed)

    def iterate(number: int) -> int:
        """Run one iteration without store, probes and checkpoints, and return the number of its decisions."""
        weights: Shared[dict[str, Any]] = Shared(learner.policy.state_dict())
        shards = [collect_rollout(ShardTask(settings, number, shard, weights)) for shard in range(settings.shards)]
        learner.update(concatenate_rollouts([shard.rollout for shard in shards]), number / (settings.iterations + 1))
        return sum(int(running.sum()) for shard in shards for running in shard.log.running)

    # Time is measured without the profiler, which slows small functions down.
    speeds: list[float] = []
    for number in range(settings.iterations):
        start = time.perf_counter()
        steps = iterate(number)
        speeds.append(steps / (time.perf_counter() - start))
        report(number + 1, speeds[-1])
    profiler = cProfile.Profile()
    profiler.runcall(iterate, settings.iterations)
    operations = count_operations_of_decision(settings, learner.policy)
    return TrainBenchmark(
        median(speeds[1:] or speeds), speeds, measure_shares(profiler), sum(operations.values()), operations
    )


def count_operations_of_decision(settings: TrainSettings, policy: Policy) -> dict[str, float]:
    """Number of operations of torch in one decision of the first shard's networks, by name, most frequent first.

    The decisions are those of `collect_rollout`, without logs and events. The result is the mean over
    `DECISIONS_COUNTED` decisions of an episode.
    """
    suite, size = get_suite(settings.suite), settings.environments // settings.shards
    config = make_evaluation_config(settings).with_promise(settings.promise)
    episodes, advisor = config.create_episodes(sample_instances(settings, 0, 0)), create_advisor(settings, suite)
    before = min(DECISIONS_BEFORE, suite.steps // 2)
    counted = min(DECISIONS_COUNTED, suite.steps - before)
    uniforms = numpy_generator(settings.seed, Stream.ACTIONS).random((before + counted, size, len(Head)))
    state = policy.initial_state(size)

    def decide(number: int) -> None:
        nonlocal state
        observation, legal = episodes.observe(), episodes.legal_actions()
        observation = observation if advisor is None else append_advice(advisor, observation, legal)
        noise = torch.from_numpy(uniforms[number]).float()
        step = policy.act(observation, make_mask_tensors(legal, CPU), state, noise).to_cpu()
        episodes.step(step.actions.numpy())
        state = step.state

    for number in range(before):
        decide(number)
    counts = Counter[str]()
    # One decision at a time, because the profiler records every call.
    for number in range(before, before + counted):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            decide(number)
        counts += count_operations(cast("Sequence[ProfiledEvent]", profiled.events()))
    return {name: count / counted for name, count in counts.most_common()}


def measure_shares(profile: cProfile.Profile) -> dict[str, float]:
    """Each part's fraction of the profiled time; all fractions add up to 1."""
    # A row has the seconds in the function itself, and in everything that it called.
    rows = cast("dict[tuple[str, int, str], tuple[int, int, float, float, Any]]", vars(pstats.Stats(profile))["stats"])
    total = sum(seconds for _, _, seconds, _, _ in rows.values())
    spent = dict.fromkeys(PARTS, 0.0)
    for name, functions in PARTS.items():
        for function in functions:
            code = cast("FunctionType", inspect.unwrap(function)).__code__  # decorators such as no_grad hide it
            row = rows.get((code.co_filename, code.co_firstlineno, code.co_name))
            spent[name] += 0.0 if row is None else row[3]
    # Optimizers are called within training.
    spent["hosts and seeds"] -= spent["optimizers"]
    spent[REST] = total - sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()}


class ProfiledEvent(Protocol):
    """The attributes used of an event of `torch.profiler.profile.events`."""

    @property
    def name(self) -> str: ...

    @property
    def cpu_parent(self) -> ProfiledEvent | None: ...

    @property
    def cpu_children(self) -> Sequence[ProfiledEvent]: ...


def count_operations(events: Iterable[ProfiledEvent]) -> Counter[str]:
    """Number of calls of each operation that would launch a kernel on a GPU, by name without ``aten::``.

    Of nested operations, only the innermost count. Views, allocations and inspections of shapes are omitted.
    """
    counts = Counter[str]()

    def count_within(event: ProfiledEvent) -> int:
        within = sum(map(count_within, event.cpu_children))
        if within or not event.name.startswith("aten::") or event.name in _WITHOUT_KERNEL:
            return within
        counts[event.name.removeprefix("aten::")] += 1
        return 1

    for event in events:
        if event.cpu_parent is None:
            count_within(event)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--iterations", type=int, default=3, help="how many are measured; the first of several warms up"
    )
    parser.add_argument("--json", action="store_true", help="print a last line of JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a setting of `esper train`")
    given = parser.parse_args()
    settings = load_settings(TrainSettings, None, ("shards=1", f"iterations={given.iterations}", *given.overrides))

    def report(number: int, speed: float) -> None:
        sys.stdout.write(f"iteration {number} of {settings.iterations}: {speed:.0f} environment steps per second\n")

    speed = measure_training(settings, report)
    for name, share in sorted(speed.share.items(), key=lambda part: -part[1]):
        sys.stdout.write(f"{name:<32}{share:>6.1%}\n")
    sys.stdout.write(
        f"median {speed.env_steps_per_second:.0f} environment steps per second; one process, one thread\n"
        f"{speed.operations_per_decision:.0f} torch operations per decision of all networks\n"
    )
    if given.json:
        sys.stdout.write(f"{json.dumps(asdict(speed))}\n")


if __name__ == "__main__":
    main()
