"""Networks that never change their shape: what the same seeds come to without control, and what training costs.

FLOPs are of training only; measurements are not counted, for anybody.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from esper.experiments.episode_log import EpisodeLog, StageChange
from esper.experiments.evaluation import COHORT, EvaluationConfig, EvaluationResult
from esper.experiments.results import Result
from esper.experiments.workers import DeviceTask, Workers
from esper.growth.blueprints.registry import get
from esper.growth.seed import count_blend_flops
from esper.lifecycle.actions import Blend, Head, wait
from esper.lifecycle.stages import BLENDED, OWNING, Stage, membership
from esper.lifecycle.table import NO_BLUEPRINT
from esper.lifecycle.transitions import Cause
from esper.rl.episodes import FinalScore
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.training.budget import TRAINING_PASSES, Cost
from esper.training.execution import Execution
from esper.training.parameters import SeedKind
from esper.training.population import Fossils

_OWNING = membership(OWNING)
_ROLLBACK = Cause.ROLLBACK.name.lower()

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SlotHistory:
    """The slots of E networks over T decisions."""

    stage: Ints
    """``[T, E, S]``: a `Stage`, while the network trained after the decision."""
    blueprint: Ints
    """``[T, E, S]``: an index of the suite's; -1 without a seed."""
    blend: Ints
    """``[T, E, S]``: the seed's `Blend`."""
    fossils: list[Fossils]
    """What each network had committed in the end, ``[E]``."""


def track_occupancy(tally: EpisodeLog, suite: Suite, given: Sequence[Fossils] = ()) -> SlotHistory:
    """Of finished episodes that began with the fossils ``given``, or with none.

    Rollbacks come after the training of their decision.
    """
    slots = _Slots.given(given, (len(tally.instances), len(suite.sites)))
    decided: list[list[StageChange]] = [[] for _ in tally.steps]
    undone: list[list[StageChange]] = [[] for _ in tally.steps]
    for change in tally.changes:
        (undone if change.cause == _ROLLBACK else decided)[change.step].append(change)
    seen: list[_Slots] = []
    for actions, before, after in zip(tally.steps, decided, undone, strict=True):
        slots.apply(before, suite, actions)
        seen.append(copy.deepcopy(slots))
        slots.apply(after, suite, actions)
    return SlotHistory(
        np.stack([one.stage for one in seen]),
        np.stack([one.blueprint for one in seen]),
        np.stack([one.blend for one in seen]),
        [slots.fossils(network) for network in range(len(tally.instances))],
    )


@dataclass
class _Slots:
    """As they are at one time, each ``[E, S]``."""

    stage: Ints
    blueprint: Ints
    blend: Ints

    @classmethod
    def given(cls, fossils: Sequence[Fossils], shape: tuple[int, int]) -> _Slots:
        blank = np.zeros(shape, np.int64)
        slots = cls(np.full_like(blank, Stage.DORMANT), np.full_like(blank, NO_BLUEPRINT), blank)
        for network, own in enumerate(fossils):
            for slot, blueprint, blend in own:
                slots.stage[network, slot] = Stage.FOSSILIZED
                slots.blueprint[network, slot], slots.blend[network, slot] = blueprint, blend
        return slots

    def apply(self, changes: Sequence[StageChange], suite: Suite, actions: Ints) -> None:
        """Carry out changes of stage; what germinated has the blend that ``actions [E, 8]`` chose."""
        for change in changes:
            where, now = (change.environment, change.slot), Stage[change.after.upper()]
            self.stage[where] = now
            named = _OWNING[now] and change.blueprint is not None
            self.blueprint[where] = suite.blueprints.index(change.blueprint) if named else NO_BLUEPRINT
            if now is Stage.GERMINATED:
                self.blend[where] = actions[change.environment, Head.BLEND]

    def fossils(self, network: int) -> Fossils:
        kept: list[int] = np.flatnonzero(self.stage[network] == Stage.FOSSILIZED).tolist()
        own = self.blueprint[network], self.blend[network]
        return tuple(SeedKind(slot, int(own[0][slot]), Blend(own[1][slot])) for slot in kept)


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


_BLENDED = membership(BLENDED)


class Prices:
    """FLOPs of one forward pass for one example of a suite's hosts and seeds; a multiply-add counts two."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._sites = Execution(suite.template(), suite.sites, torch.zeros(2, *suite.input_shape)).sites
        self._known: dict[tuple[int, ...], tuple[int, Cost]] = {}

    def host(self, instance: Instance) -> int:
        """Of the instance's host."""
        return self._priced(instance)[0]

    def seeds(self, instance: Instance) -> Cost:
        """Of seeds in the host's slots, for E = 1."""
        return self._priced(instance)[1]

    def network(self, instance: Instance, fossils: Fossils) -> int:
        """Of the host with fossils."""
        seeds = self.seeds(instance)
        of_fossils = [
            seeds.blueprints[0, one.slot, one.blueprint] + seeds.blends[0, one.slot, one.blend] for one in fossils
        ]
        return self.host(instance) + int(sum(of_fossils))

    def _priced(self, instance: Instance) -> tuple[int, Cost]:
        """Hosts of equal widths cost the same, and counting takes milliseconds."""
        widths = instance.widths
        if widths not in self._known:
            sites = [site.with_width(width) for site, width in zip(self._sites, widths, strict=True)]
            kinds = [get(name) for name in self._suite.blueprints]
            seeds = [[kind.flops_at(site) if kind.serves(site) else 0 for kind in kinds] for site in sites]
            blends = [[count_blend_flops(blend, site) for blend in Blend] for site in sites]
            self._known[widths] = self._suite.flops(instance), Cost(np.array([seeds]), np.array([blends]))
        return self._known[widths]


def examples_per_decision(suite: Suite) -> int:
    """Examples that a network is trained on after each decision."""
    return suite.batches_per_step * suite.batch_size


def training_flops(
    suite: Suite, prices: Prices, instances: Sequence[Instance], slots: SlotHistory, running: Bools
) -> Ints:
    """FLOPs of each network's training after each decision, ``[T, E]``; 0 where it is not ``running``, bool ``[T, E]``.

    Host and seeds that count in the forward pass. Seeds that train in isolation take a second pass, of the whole
    network with them in it.
    """
    host = np.array([prices.host(instance) for instance in instances])
    cost = Cost.concatenate([prices.seeds(instance) for instance in instances]).of(slots.blueprint, slots.blend)
    whole = host + (cost * _BLENDED[slots.stage]).sum(-1)
    isolated = slots.stage == Stage.TRAINING
    second = np.where(isolated.any(-1), whole + (cost * isolated).sum(-1), 0)
    return TRAINING_PASSES * examples_per_decision(suite) * (whole + second) * running


@dataclass(frozen=True)
class MeasuredArm:
    """What a controller did on its instances, and what it came to."""

    outcomes: list[Result]
    slots: list[SlotHistory]
    """One per cohort."""
    flops: list[int]
    """Of each network's training."""


def measure_arm(played: EvaluationResult, suite: Suite) -> MeasuredArm:
    """Of the episodes that a controller has played."""
    slots = [track_occupancy(tally, suite) for tally in played.tallies]
    prices = Prices(suite)
    flops = [
        training_flops(suite, prices, tally.instances, own, np.stack(tally.running)).sum(0)
        for tally, own in zip(played.tallies, slots, strict=True)
    ]
    spent: list[int] = np.concatenate(flops).tolist()
    outcomes = [replace(one, flops=cost) for one, cost in zip(played.records, spent, strict=True)]
    return MeasuredArm(outcomes, slots, spent)


@dataclass(frozen=True)
class StaticNetwork:
    """A network to be trained from scratch."""

    instance: Instance
    fossils: Fossils
    """Fresh seeds at alpha 1."""
    decisions: int
    """How long, in units of the minibatches between two decisions."""


@dataclass(frozen=True)
class StaticTask(DeviceTask):
    """Networks that are trained side by side; any process may compute it."""

    terms: EvaluationConfig
    arm: str
    networks: Sequence[StaticNetwork]

    @property
    def device(self) -> str:
        return self.terms.device


def train_static(
    workers: Workers, terms: EvaluationConfig, arm: str, networks: Sequence[StaticNetwork]
) -> list[Result]:
    """Train the networks, each for as long as it is to, and score them on test data; results in their order."""
    order = sorted(range(len(networks)), key=lambda index: networks[index].decisions)
    parts = [order[start : start + COHORT] for start in range(0, len(order), COHORT)]
    tasks = [StaticTask(terms, arm, [networks[index] for index in part]) for part in parts]
    outcomes: dict[int, Result] = {}
    for part, found in zip(parts, workers.map(train_cohort, tasks), strict=True):
        outcomes |= dict(zip(part, found, strict=True))
    return [outcomes[index] for index in range(len(networks))]


def train_cohort(task: StaticTask) -> list[Result]:
    """Train a cohort until the last one is done, and score each network when its own time is up.

    What comes after the suite's horizon are further epochs in the same kind of shuffled order.
    """
    ends = np.array([network.decisions for network in task.networks])
    suite = lengthen(get_suite(task.terms.suite), int(ends.max()))
    instances = [network.instance for network in task.networks]
    fossils = [network.fossils for network in task.networks]
    terms = replace(task.terms, conduct=task.terms.conduct.model_copy(update={"plateau": None}))
    episodes = terms.episodes(instances, suite=suite, fossils=fossils)
    tally, waiting = EpisodeLog(suite, instances), wait(len(instances))
    finals: dict[int, FinalScore] = {}
    for decision in range(1, suite.steps + 1):
        tally.add(waiting, episodes.step(waiting))
        if decision in ends:
            finals[decision] = episodes.final_score()
    slots = track_occupancy(tally, suite, fossils)
    spent = training_flops(suite, Prices(suite), instances, slots, np.stack(tally.running)).cumsum(0)
    hosts = episodes.population.host_parameters
    return [
        _outcome(task.arm, instance, finals[end], row, int(hosts[row]), int(spent[end - 1, row]))
        for row, (instance, end) in enumerate(zip(instances, ends.tolist(), strict=True))
    ]


def lengthen(suite: Suite, steps: int) -> Suite:
    """The suite with episodes of another length; their data begin in the same order."""
    changed = copy.copy(suite)
    changed.steps = steps
    return changed


def _outcome(arm: str, instance: Instance, final: FinalScore, row: int, host: int, flops: int) -> Result:
    return Result(
        arm,
        instance.name,
        instance.family,
        instance.variant,
        float(final.score[row]),
        float(final.accuracy[row]),
        int(final.added_parameters[row]),
        host,
        flops=flops,
    )
