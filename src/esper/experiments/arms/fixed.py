"""Networks that never change their shape: with these fossils from the first step, trained for so long."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from esper.experiments.arms.flops import Prices, training_flops
from esper.experiments.arms.occupancy import occupancy
from esper.experiments.arms.outcome import Outcome
from esper.experiments.placement import Placed
from esper.experiments.play import COHORT, Terms
from esper.experiments.tallies import Tally
from esper.experiments.workers import Workers
from esper.lifecycle.actions import wait
from esper.rl.episodes import FinalScore
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.training.population import Fossils


@dataclass(frozen=True)
class FixedNetwork:
    """A network to be trained from scratch."""

    instance: Instance
    fossils: Fossils
    """Fresh seeds at alpha 1."""
    decisions: int
    """How long, in units of the minibatches between two decisions."""


@dataclass(frozen=True)
class FixedTask(Placed):
    """Networks that are trained side by side; any process may compute it."""

    terms: Terms
    arm: str
    networks: Sequence[FixedNetwork]

    @property
    def device(self) -> str:
        return self.terms.device


def train_fixed(workers: Workers, terms: Terms, arm: str, networks: Sequence[FixedNetwork]) -> list[Outcome]:
    """Train the networks, each for as long as it is to, and score them on test data; results in their order."""
    order = sorted(range(len(networks)), key=lambda index: networks[index].decisions)
    parts = [order[start : start + COHORT] for start in range(0, len(order), COHORT)]
    tasks = [FixedTask(terms, arm, [networks[index] for index in part]) for part in parts]
    outcomes: dict[int, Outcome] = {}
    for part, found in zip(parts, workers.map(train_cohort, tasks), strict=True):
        outcomes |= dict(zip(part, found, strict=True))
    return [outcomes[index] for index in range(len(networks))]


def train_cohort(task: FixedTask) -> list[Outcome]:
    """Train a cohort until the last one is done, and score each network when its own time is up.

    What comes after the suite's horizon are further epochs in the same kind of shuffled order.
    """
    ends = np.array([network.decisions for network in task.networks])
    suite = lengthened(get_suite(task.terms.suite), int(ends.max()))
    instances = [network.instance for network in task.networks]
    fossils = [network.fossils for network in task.networks]
    terms = replace(task.terms, conduct=task.terms.conduct.model_copy(update={"plateau": None}))
    episodes = terms.episodes(instances, suite=suite, fossils=fossils)
    tally, waiting = Tally(suite, instances), wait(len(instances))
    finals: dict[int, FinalScore] = {}
    for decision in range(1, suite.steps + 1):
        tally.add(waiting, episodes.step(waiting))
        if decision in ends:
            finals[decision] = episodes.final_score()
    slots = occupancy(tally, suite, fossils)
    spent = training_flops(suite, Prices(suite), instances, slots, np.stack(tally.running)).cumsum(0)
    hosts = episodes.population.host_parameters
    return [
        _outcome(task.arm, instance, finals[end], row, int(hosts[row]), int(spent[end - 1, row]))
        for row, (instance, end) in enumerate(zip(instances, ends.tolist(), strict=True))
    ]


def lengthened(suite: Suite, steps: int) -> Suite:
    """The suite with episodes of another length; their data begin in the same order."""
    changed = copy.copy(suite)
    changed.steps = steps
    return changed


def _outcome(arm: str, instance: Instance, final: FinalScore, row: int, host: int, flops: int) -> Outcome:
    return Outcome(
        arm,
        instance.name,
        instance.family,
        instance.variant,
        float(final.score[row]),
        float(final.accuracy[row]),
        int(final.added_parameters[row]),
        host,
        flops,
    )
