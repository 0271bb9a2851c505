"""A rollout on several hosts, which are simulated: is it the local one, and what does it cost in time and traffic?

    sudo python benchmarks/ray_hosts.py [--hosts 2] [--rounds 3] [--rate 100mbit] [--kill] [--cut] [KEY=VALUE ...]

Each host has a network, processes, memory and files of its own (see simulated_hosts.py) and runs a Ray node of one CPU;
a further one, the head, has no CPU for Ray and runs this program. The same rollout is computed with one host at a time
and with all, in turns. KEY=VALUE are settings of `esper train`.

`--kill` ends all processes of a host in mid-rollout. `--cut` cuts off its power instead: no connection is closed, so it
takes Ray minutes to notice (RAY_grpc_client_keepalive_time_ms and RAY_grpc_client_keepalive_timeout_ms say how many).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from ray_traffic import Sizes, measure_sizes, write_line
from simulated_hosts import HEAD_ADDRESS, Host, Traffic, become_head, make_network, start_host

from esper.config.loading import load_settings
from esper.rl.ppo import PPO
from esper.rl.rollout import concatenate_rollouts
from esper.signals import raise_terminated
from esper.train.ray_workers import RayWorkers
from esper.train.settings import TrainSettings
from esper.train.trainer import ShardResult, ShardTask, collect_rollout, create_policy
from esper.train.workers import LocalWorkers, Workers

RAY = Path(sys.executable).with_name("ray")
ADDRESS = f"{HEAD_ADDRESS}:6379"
OBJECT_STORE_BYTES = 100_000_000
# Nobody else can reach this network.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
JOIN_SECONDS = 60
KIB = 2**10


def ray_node(address: str, *more: str) -> list[str]:
    store = f"--object-store-memory={OBJECT_STORE_BYTES}"
    return [str(RAY), "start", f"--node-ip-address={address}", store, *more]


def start_cluster(count: int, rate: str | None) -> list[Host]:
    make_network()
    head = ray_node(HEAD_ADDRESS, "--head", "--num-cpus=0", "--include-dashboard=false")
    subprocess.run(head, check=True, env=ENVIRONMENT, capture_output=True)
    node = ray_node("{address}", f"--address={ADDRESS}", "--num-cpus=1", "--block")
    return [start_host(number, node, ENVIRONMENT, rate) for number in range(1, count + 1)]


def wait_for(hosts: Sequence[Host]) -> None:
    end = time.monotonic() + JOIN_SECONDS
    while ray.cluster_resources().get("CPU", 0) < len(hosts):
        if time.monotonic() > end:
            logs = "".join(f"\n{host.name}: {host.log.read_text()}" for host in hosts)
            sys.exit(f"not all {len(hosts)} hosts have joined Ray within {JOIN_SECONDS} seconds{logs}")
        time.sleep(0.1)


def collected(workers: Workers, settings: TrainSettings) -> tuple[float, list[ShardResult]]:
    """Seconds, and the shards of the first rollout."""
    began = time.perf_counter()
    weights = workers.share(create_policy(settings).state_dict())
    tasks = [ShardTask(settings, 0, shard, weights) for shard in range(settings.shards)]
    shards = workers.map(collect_rollout, tasks)
    return time.perf_counter() - began, shards


def outcome(settings: TrainSettings, shards: Sequence[ShardResult]) -> list[torch.Tensor]:
    """All tensors of the rollout, and of the learner after its update from it."""
    rollout = concatenate_rollouts([shard.rollout for shard in shards])
    learner = PPO(create_policy(settings), settings.ppo, settings.seed)
    learner.update(rollout, 0.0)
    return [*tensors_of(rollout), *learner.state_tensors().values()]


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else value
    return [tensor for part in parts for tensor in tensors_of(part)]


class Check:
    """Holds results to the local one."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        with LocalWorkers(1) as workers:
            _, shards = collected(workers, settings)
        self._expected = outcome(settings, shards)

    def __call__(self, what: str, shards: Sequence[ShardResult]) -> None:
        found = outcome(self._settings, shards)
        pairs = zip(found, self._expected, strict=True)
        differing = sum(not torch.equal(one, other) for one, other in pairs)
        if differing:
            sys.exit(f"{what}: {differing} of {len(found)} tensors differ from those computed locally")
        write_line(
            f"{what}: equal to the local result, all {len(found)} tensors of the rollout and of the updated learner"
        )


def measure(workers: RayWorkers, settings: TrainSettings, hosts: Sequence[Host], rounds: int, check: Check) -> float:
    """Rollouts with one host at a time and with all of them, in turns; the seconds of one with all."""
    expected, counts = measure_sizes(settings), (1, len(hosts))
    _, shards = collected(workers, settings)  # workers import torch now
    check("rollout", shards)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:  # all of them last, whose traffic is told
            workers.max_tasks = count
            before = [host.traffic() for host in hosts]
            took, _ = collected(workers, settings)
            seconds[count].append(took)
            crossed = [host.traffic() - then for host, then in zip(hosts, before, strict=True)]
    workers.max_tasks = len(hosts)
    for count, found in seconds.items():
        write_line(f"{count} host(s): {median(found):.2f} s per rollout ({min(found):.2f} to {max(found):.2f})")
    say_traffic(settings, hosts, crossed, expected)
    return median(seconds[len(hosts)])


def say_traffic(settings: TrainSettings, hosts: Sequence[Host], crossed: Sequence[Traffic], expected: Sizes) -> None:
    shards = settings.shards / len(hosts)
    inwards = expected.weights + shards * expected.task
    outwards = shards * expected.result
    write_line(
        f"one rollout, by ray_traffic.py for {shards:g} shards a host: {inwards / KIB:,.0f} KiB to a host, "
        f"{outwards / KIB:,.0f} KiB from it"
    )
    for host, traffic in zip(hosts, crossed, strict=True):
        write_line(
            f"one rollout, at the card of {host.name}: {traffic.received / KIB:,.0f} KiB to it "
            f"({traffic.received / inwards:.2f} of that), {traffic.sent / KIB:,.0f} KiB from it "
            f"({traffic.sent / outwards:.2f})"
        )


def lose_one(
    workers: RayWorkers, settings: TrainSettings, hosts: Sequence[Host], check: Check, after: float, *, cut: bool
) -> None:
    """A rollout, and after so many seconds of it the first host is lost."""
    loss = threading.Timer(after, hosts[0].end, kwargs={"silently": cut})
    loss.start()
    seconds, shards = collected(workers, settings)
    how = "lost its power" if cut else "was killed"
    if seconds < after:
        sys.exit(f"the rollout was over before {hosts[0].name} {how}: take more environments")
    write_line(f"{hosts[0].name} {how} in mid-rollout, which went on for {seconds - after:.1f} s")
    check("rollout of the hosts that are left", shards)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", help="of each host's network, as for tc, for instance 100mbit")
    loss = parser.add_mutually_exclusive_group()
    loss.add_argument("--kill", action="store_true")
    loss.add_argument("--cut", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    settings = load_settings(TrainSettings, None, arguments.overrides)
    become_head()
    os.environ.update(ENVIRONMENT)
    with raise_terminated():
        hosts = start_cluster(arguments.hosts, arguments.rate)
        check = Check(settings)
        with RayWorkers(arguments.hosts, ADDRESS) as workers:
            wait_for(hosts)
            seconds = measure(workers, settings, hosts, arguments.rounds, check)
            if arguments.kill or arguments.cut:
                lose_one(workers, settings, hosts, check, seconds / 2, cut=arguments.cut)


if __name__ == "__main__":
    main()
