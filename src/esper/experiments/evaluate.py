"""Compare a run's policy with the baselines on instances that nobody trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from esper import __version__
from esper.checkpoints import Checkpoints
from esper.config import load_settings
from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.loading import restore_policy
from esper.control.rules.simple import SHUFFLED, Replay, shuffle_actions
from esper.errors import ConfigError
from esper.experiments.baselines import baseline_settings, baselines
from esper.experiments.behaviour import Behaviour, describe_behaviour, write_behaviour
from esper.experiments.episode_log import stack_actions
from esper.experiments.evaluation import (
    CohortTask,
    EvaluationProgress,
    EvaluationResult,
    evaluation_config,
    join_cohorts,
    split_into_cohorts,
)
from esper.experiments.results import SPLITS, Result, write_results
from esper.experiments.settings import TrainSettings
from esper.experiments.workers import Workers
from esper.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split
from esper.telemetry.run_directory import RunDirectory

_STREAMS: dict[Split, Stream] = {"heldout": Stream.HELDOUT_INSTANCES, "transfer": Stream.TRANSFER_INSTANCES}
HELDOUT_INSTANCES = 256
TRANSFER_INSTANCES = 64
FEWEST_INSTANCES = 2
"""Of one instance there is no interval."""

Progress = Callable[[int, int, str], None]
"""Told how many controllers have played, of how many, and which one plays next (empty at the end)."""

TakenOver = Callable[[int, int], None]
"""Told once how many cohorts an earlier evaluation has played already, of how many."""


class LoadedPolicy(NamedTuple):
    """A run's newest policy, greedy, the training iterations it had, and the hash of its checkpoint."""

    controller: LearnedController
    iteration: int
    sha256: str


@dataclass(frozen=True)
class RunEvaluation:
    """What all controllers scored, and what the policy did."""

    results: list[Result]
    behaviour: Behaviour


class _Game(NamedTuple):
    split: Split
    controller: Controller
    cohorts: list[CohortTask]


def load_policy(run: RunDirectory, settings: TrainSettings) -> LoadedPolicy:
    """The policy of the newest checkpoint.

    Raises:
        CheckpointError: there is no usable checkpoint, or it belongs to other settings.
    """
    checkpoint = Checkpoints(run.checkpoints).latest()
    controller = restore_policy(checkpoint.tensors, settings.policy)
    return LoadedPolicy(controller, checkpoint.iteration, checkpoint.sha256)


def instances_for(settings: TrainSettings, split: Split, count: int) -> list[Instance]:
    """The instances that all controllers of a run are evaluated on."""
    rng = numpy_generator(settings.seed, _STREAMS[split])
    return get_suite(settings.suite).sample(count, split, rng)


def _ignore_progress(_done: int, _total: int, _current: str = "") -> None:
    """Progress that nobody watches."""


def evaluate_run(
    run: RunDirectory,
    workers: Workers,
    heldout: int = HELDOUT_INSTANCES,
    transfer: int = TRANSFER_INSTANCES,
    progress: Progress = _ignore_progress,
    taken_over: TakenOver = _ignore_progress,
) -> RunEvaluation:
    """Let the policy and all baselines play the same instances, and write the results into the run.

    So does ``shuffled``: the policy's own actions, each instance's played on another one. What the policy scores above
    it, it owes to looking.

    ``heldout`` counts instances of the families trained on, ``transfer`` those of others; 0 leaves transfer out. What
    the same evaluation finished before it was stopped is not played again.

    Raises:
        ConfigError: too few instances.
        CheckpointError: the run has no usable policy.
        RunError: the results cannot be written.
    """
    _check_counts(heldout, transfer)
    settings = load_settings(TrainSettings, run.config)
    suite = get_suite(settings.suite)
    policy = load_policy(run, settings)
    controllers = [policy.controller, *baselines(suite), Replay({}, SHUFFLED)]
    games = [
        game
        for split, count in zip(SPLITS, (heldout, transfer), strict=True)
        if count
        for game in _games(settings, split, count, controllers)
    ]
    tasks = [task for game in games for task in game.cohorts]
    finished = EvaluationProgress(run.evaluation_progress, _circumstances(settings, policy), tasks)
    taken_over(finished.taken_over, len(tasks))
    results: list[Result] = []
    own: list[tuple[Split, EvaluationResult]] = []
    for done, game in enumerate(games):
        progress(done, len(games), f"{game.controller.name}, {game.split} instances")
        if game.controller.name == SHUFFLED:
            game = _shuffle_game(game, settings, own[-1][1])
        played = join_cohorts(1, finished.play(workers, game.cohorts))[0]
        results += [replace(record, split=game.split) for record in played.records]
        if game.controller is policy.controller:
            own.append((game.split, played))
    progress(len(games), len(games), "")
    found = RunEvaluation(results, describe_behaviour(suite, policy.iteration, own))
    write_results(run.evaluation, found.results)
    write_behaviour(run.behaviour, found.behaviour)
    finished.remove()
    return found


def _games(settings: TrainSettings, split: Split, count: int, controllers: Sequence[Controller]) -> list[_Game]:
    instances = instances_for(settings, split, count)
    terms = evaluation_config(settings)
    return [
        _Game(split, one, split_into_cohorts([one], terms, instances, attributed=one.name == LearnedController.name))
        for one in controllers
    ]


def _shuffle_game(game: _Game, settings: TrainSettings, played: EvaluationResult) -> _Game:
    """The game in which the policy's own actions are played again, each instance's on another one of the split."""
    instances = [instance for task in game.cohorts for part in task.parts for instance in part.instances]
    rng = numpy_generator(settings.seed, _STREAMS[game.split], Stream.SHUFFLED_EVALUATION)
    controller = shuffle_actions(stack_actions(played.tallies), [instance.seed for instance in instances], rng)
    return _Game(game.split, controller, split_into_cohorts([controller], evaluation_config(settings), instances))


def _circumstances(settings: TrainSettings, policy: LoadedPolicy) -> dict[str, Any]:
    """All that results follow from, besides controllers' names and instances."""
    return {
        "esper": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "policy": policy.sha256,
        "settings": settings.model_dump(mode="json"),
        "baselines": baseline_settings(get_suite(settings.suite)).model_dump(mode="json"),
    }


def _check_counts(heldout: int, transfer: int) -> None:
    if heldout < FEWEST_INSTANCES:
        raise ConfigError(f"{heldout} instances give no interval: ask for at least {FEWEST_INSTANCES}")
    if transfer != 0 and transfer < FEWEST_INSTANCES:
        raise ConfigError(f"{transfer} transfer instances give no interval: ask for at least {FEWEST_INSTANCES}, or 0")
