"""Let a controller play instances to the end and score what it committed on test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.control.controller import Controller
from esper.experiments.tallies import Tally
from esper.experiments.workers import LocalWorkers
from esper.lifecycle.rules import Rules
from esper.rl.episodes import Episodes
from esper.rl.rewards import outcome
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

COHORT = 64
"""Networks played side by side."""


@dataclass(frozen=True)
class Record:
    """One controller's result on one instance."""

    controller: str
    instance: str
    family: str
    variant: str
    score: float
    """``test_accuracy - rent * log1p(added_parameters / host_parameters)``."""
    test_accuracy: float
    added_parameters: int
    host_parameters: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class Played:
    """The records of a list of instances, in its order, and what happened on the way."""

    records: list[Record]
    tallies: list[Tally]


@dataclass(frozen=True)
class PlayTask:
    """A controller and the instances it is to play; any process may compute it."""

    controller: Controller
    suite: str
    rules: Rules
    instances: Sequence[Instance]


def play_cohort(task: PlayTask) -> Played:
    """Play all instances of the task side by side. What is random in a controller follows from the instance's seed."""
    suite = get_suite(task.suite)
    episodes = Episodes(suite, task.instances, task.rules, outcome)
    tally = Tally(suite, task.instances)
    state = task.controller.start([instance.seed for instance in task.instances])
    while not episodes.finished.all():
        actions, state = task.controller.act(episodes.observe(), episodes.legal_actions(), state)
        tally.add(actions, episodes.step(actions))
    tally.finish(episodes)
    final = episodes.final_score()
    hosts = episodes.population.host_parameters
    records = [
        Record(
            task.controller.name,
            instance.name,
            instance.family,
            instance.variant,
            float(final.score[row]),
            float(final.accuracy[row]),
            int(final.added_parameters[row]),
            int(hosts[row]),
        )
        for row, instance in enumerate(task.instances)
    ]
    return Played(records, [tally])


def play(
    workers: LocalWorkers, controllers: Sequence[Controller], suite: str, rules: Rules, instances: Sequence[Instance]
) -> list[Played]:
    """Every controller on every instance; the results in the order of the controllers."""
    cohorts = [instances[start : start + COHORT] for start in range(0, len(instances), COHORT)]
    tasks = [PlayTask(controller, suite, rules, cohort) for controller in controllers for cohort in cohorts]
    results = workers.map(play_cohort, tasks)
    played: list[Played] = []
    for index in range(len(controllers)):
        own = results[index * len(cohorts) : (index + 1) * len(cohorts)]
        played.append(Played([r for part in own for r in part.records], [t for part in own for t in part.tallies]))
    return played


def mean_score(played: Played) -> float:
    """Mean score over the instances."""
    return float(np.mean([record.score for record in played.records]))
