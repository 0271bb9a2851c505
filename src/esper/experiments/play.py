"""Let a controller play instances to the end and score what it committed on test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import Actions, Controller
from esper.control.observation import Observation
from esper.devices import CPU, usable_device
from esper.experiments.earnings import Earnings, earnings
from esper.experiments.placement import Placed, enough_memory
from esper.experiments.settings import TrainSettings
from esper.experiments.tallies import Tally
from esper.experiments.workers import Workers
from esper.lifecycle.rules import Rules
from esper.rl.conduct import Conduct
from esper.rl.episodes import Episodes, FinalScore
from esper.rl.rewards.settings import RewardSettings
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.training.plan import Strategy
from esper.training.roster import Fossils

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

    @property
    def growth(self) -> float:
        """Added parameters over the host's."""
        return self.added_parameters / self.host_parameters


@dataclass(frozen=True)
class Played:
    """The records of a list of instances, in its order, and what happened on the way."""

    records: list[Record]
    tallies: list[Tally]
    earnings: list[Earnings] = field(default_factory=list[Earnings])
    """One per record if they were asked for, otherwise none."""


@dataclass(frozen=True)
class Part:
    """A controller and the instances it is to play."""

    controller: Controller
    instances: Sequence[Instance]


@dataclass(frozen=True)
class Terms:
    """What holds for all who play."""

    suite: str
    rules: Rules
    conduct: Conduct = Conduct()
    device: str = CPU
    """Where networks are computed, as torch names it; controllers decide on the CPU."""
    networks_per_pass: int | None = None
    strategy: Strategy = "stacked"

    def episodes(
        self,
        instances: Sequence[Instance],
        *,
        suite: Suite | None = None,
        rewards: Sequence[RewardSettings] = (),
        fossils: Sequence[Fossils] = (),
    ) -> Episodes:
        """Episodes under these terms; of another suite than the one of that name, where one is given.

        Raises:
            ConfigError: this machine has no such device.
        """
        return Episodes(
            suite or get_suite(self.suite),
            instances,
            self.rules,
            self.conduct,
            rewards=rewards,
            fossils=fossils,
            strategy=self.strategy,
            networks_per_pass=self.networks_per_pass,
            device=usable_device(self.device),
        )


def terms_of(settings: TrainSettings, device: str | None = None) -> Terms:
    """Those of a training run, on its first device or another one."""
    return Terms(
        settings.suite,
        settings.rules,
        settings.conduct,
        settings.devices[0] if device is None else device,
        settings.networks_per_pass,
        settings.strategy,
    )


@dataclass(frozen=True)
class PlayTask(Placed):
    """Parts that are played side by side, as one cohort; any process may compute it."""

    terms: Terms
    parts: Sequence[Part]
    attributed: bool = False
    """Whether to tell what the kept seeds earned."""

    @property
    def device(self) -> str:
        return self.terms.device


@enough_memory()
def play_cohort(task: PlayTask) -> list[Played]:
    """Play all parts, each by its controller. What is random in a controller follows from the instance's seed.

    Raises:
        RunError: the device's memory ran out.
    """
    terms, suite = task.terms, get_suite(task.terms.suite)
    instances = [instance for part in task.parts for instance in part.instances]
    episodes = terms.episodes(instances)
    ends = np.cumsum([len(part.instances) for part in task.parts]).tolist()
    places = [slice(end - len(part.instances), end) for part, end in zip(task.parts, ends, strict=True)]
    tally = Tally(suite, instances)
    states = [part.controller.start([instance.seed for instance in part.instances]) for part in task.parts]
    while not episodes.finished.all():
        observation, masks = episodes.observe(), episodes.legal_actions()
        actions: list[Actions] = []
        for index, (part, place) in enumerate(zip(task.parts, places, strict=True)):
            seen = Observation(*(features[place] for features in observation))
            chosen, states[index] = part.controller.act(seen, masks.rows(place), states[index])
            actions.append(chosen)
        joint = np.concatenate(actions)
        tally.add(joint, episodes.step(joint))
    tally.finish(episodes)
    final = episodes.final_score()
    earned = earnings(episodes) if task.attributed else []
    return [
        Played(_records(part, final, episodes.population.host_parameters, place), [tally.part(place)], earned[place])
        for part, place in zip(task.parts, places, strict=True)
    ]


def _records(part: Part, final: FinalScore, hosts: NDArray[np.int64], place: slice) -> list[Record]:
    return [
        Record(
            part.controller.name,
            instance.name,
            instance.family,
            instance.variant,
            float(final.score[row]),
            float(final.accuracy[row]),
            int(final.added_parameters[row]),
            int(hosts[row]),
        )
        for row, instance in enumerate(part.instances, start=place.start)
    ]


def cohorts(
    controllers: Sequence[Controller], terms: Terms, instances: Sequence[Instance], *, attributed: bool = False
) -> list[PlayTask]:
    """Every controller on every instance, as tasks, ``attributed`` or not.

    Cohorts are filled with the parts of several controllers where there are fewer instances than `COHORT`.
    """
    size = min(COHORT, len(instances))
    parts = [
        Part(controller, instances[start : start + size])
        for controller in controllers
        for start in range(0, len(instances), size)
    ]
    together = max(COHORT // size, 1)
    return [PlayTask(terms, parts[start : start + together], attributed) for start in range(0, len(parts), together)]


def by_controller(controllers: int, played: Sequence[Sequence[Played]]) -> list[Played]:
    """What the cohorts of that many controllers led to, put together for each."""
    parts = [part for cohort in played for part in cohort]
    each = len(parts) // controllers
    return [
        Played(
            [record for one in own for record in one.records],
            [tally for one in own for tally in one.tallies],
            [earned for one in own for earned in one.earnings],
        )
        for own in (parts[start : start + each] for start in range(0, len(parts), each))
    ]


def play(
    workers: Workers, controllers: Sequence[Controller], terms: Terms, instances: Sequence[Instance]
) -> list[Played]:
    """Every controller on every instance; the results in the order of the controllers."""
    tasks = cohorts(controllers, terms, instances)
    return by_controller(len(controllers), workers.map(play_cohort, tasks))


def mean_score(played: Played) -> float:
    """Mean score over the instances."""
    return float(np.mean([record.score for record in played.records]))
