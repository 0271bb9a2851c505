"""Compare a run's policy with the baselines on instances that nobody trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from esper.config import load_settings
from esper.control.controller import Controller
from esper.control.learned import Learned
from esper.errors import ConfigError
from esper.experiments.baselines import baselines
from esper.experiments.behaviour import Behaviour, behaviour, write_behaviour
from esper.experiments.checkpoints import Checkpoints
from esper.experiments.collect import new_policy
from esper.experiments.play import Played, play
from esper.experiments.results import Result, write_results
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.experiments.workers import LocalWorkers
from esper.rl.ppo import Learner
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split

SPLITS: tuple[Split, ...] = ("heldout", "transfer")
"""What is evaluated on, in this order."""

_STREAMS: dict[Split, int] = {"heldout": 4, "transfer": 5}
"""Keeps the instances of evaluations apart from those of training and from each other."""

HELDOUT_INSTANCES = 256
TRANSFER_INSTANCES = 64
FEWEST_INSTANCES = 2
"""Of one instance there is no interval."""

Progress = Callable[[int, int, str], None]
"""Told how many controllers have played, of how many, and which one plays next (empty at the end)."""


class LoadedPolicy(NamedTuple):
    """A run's newest policy, greedy, and the training iterations it had."""

    controller: Learned
    iteration: int


@dataclass(frozen=True)
class Evaluation:
    """What all controllers scored, and what the policy did."""

    results: list[Result]
    behaviour: Behaviour


class _Game(NamedTuple):
    split: Split
    controller: Controller
    instances: list[Instance]


def load_policy(run: RunDirectory, settings: TrainSettings) -> LoadedPolicy:
    """The policy of the newest checkpoint.

    Raises:
        CheckpointError: there is no usable checkpoint, or it belongs to other settings.
    """
    checkpoint = Checkpoints(run.checkpoints).latest()
    policy = new_policy(settings)
    Learner(policy, settings.ppo, settings.seed).load_state_tensors(checkpoint.tensors)
    return LoadedPolicy(Learned(policy, greedy=True), checkpoint.iteration)


def instances_for(settings: TrainSettings, split: Split, count: int) -> list[Instance]:
    """The instances that all controllers of a run are evaluated on."""
    rng = np.random.default_rng((settings.seed, _STREAMS[split]))
    return get_suite(settings.suite).sample(count, split, rng)


def _unseen(_done: int, _total: int, _current: str) -> None:
    """Progress that nobody watches."""


def evaluate(
    run: RunDirectory,
    workers: LocalWorkers,
    heldout: int = HELDOUT_INSTANCES,
    transfer: int = TRANSFER_INSTANCES,
    progress: Progress = _unseen,
) -> Evaluation:
    """Let the policy and all baselines play the same instances, and write the results into the run.

    ``heldout`` counts instances of the families trained on, ``transfer`` those of others; 0 leaves transfer out.

    Raises:
        ConfigError: too few instances.
        CheckpointError: the run has no usable policy.
        RunError: the results cannot be written.
    """
    _check_counts(heldout, transfer)
    settings = load_settings(TrainSettings, run.config)
    suite = get_suite(settings.suite)
    policy, iteration = load_policy(run, settings)
    controllers = [policy, *baselines(suite)]
    counts: dict[Split, int] = dict(zip(SPLITS, (heldout, transfer), strict=True))
    games = [
        _Game(split, controller, instances_for(settings, split, counts[split]))
        for split in SPLITS
        for controller in controllers
        if counts[split]
    ]
    results: list[Result] = []
    own: list[tuple[Split, Played]] = []
    for done, game in enumerate(games):
        progress(done, len(games), f"{game.controller.name}, {game.split} instances")
        played = play(workers, [game.controller], settings.suite, settings.rules, game.instances)[0]
        results += [Result(**asdict(record), split=game.split) for record in played.records]
        if game.controller is policy:
            own.append((game.split, played))
    progress(len(games), len(games), "")
    found = Evaluation(results, behaviour(suite, iteration, own))
    write_results(run.evaluation, found.results)
    write_behaviour(run.behaviour, found.behaviour)
    return found


def _check_counts(heldout: int, transfer: int) -> None:
    if heldout < FEWEST_INSTANCES:
        raise ConfigError(f"{heldout} instances give no interval: ask for at least {FEWEST_INSTANCES}")
    if transfer != 0 and transfer < FEWEST_INSTANCES:
        raise ConfigError(f"{transfer} transfer instances give no interval: ask for at least {FEWEST_INSTANCES}, or 0")
