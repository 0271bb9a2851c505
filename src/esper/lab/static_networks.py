"""Networks that never change their shape: what the same seeds come to without control, and what training costs.

FLOPs are of training only; measurements are not counted, for anybody.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from esper.engine.budget import TRAINING_PASSES, Cost
from esper.growth.blueprints.registry import get
from esper.growth.seed import count_blend_flops
from esper.growth.site import Site
from esper.lifecycle.actions import Blend, Head, make_wait_actions
from esper.lifecycle.stages import BLENDED, OWNING, Stage, make_stage_lookup
from esper.lifecycle.table import NO_BLUEPRINT
from esper.lifecycle.transitions import Cause
from esper.numerics.arrays import Bools, Ints, merge_arrays
from esper.population.execution import Execution
from esper.population.parameters import SeedKind
from esper.population.population import Fossils
from esper.rl.episodes import FinalScore
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.episode_log import EpisodeLog, StageChange
from esper.train.evaluation import COHORT, EvaluationConfig, EvaluationResult, make_result
from esper.train.results import Result
from esper.train.workers import DeviceTask, Workers

_OWNING, _BLENDED = make_stage_lookup(OWNING), make_stage_lookup(BLENDED)
_ROLLBACK = Cause.ROLLBACK.name.lower()


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


def track_slots(log: EpisodeLog, suite: Suite, given: Sequence[Fossils] = ()) -> SlotHistory:
    """What filled the slots in finished episodes that began with the fossils ``given``, or with none.

    Rollbacks come after the training of their decision: it is the next one's that feels them first.
    """

    def starts(change: StageChange) -> int:
        return change.step + (change.cause == _ROLLBACK)

    shape = (len(log.steps) + 1, len(log.instances), len(suite.sites))  # with the end of the episodes
    stage, blueprint, blend = (np.full(shape, initial, np.int64) for initial in (Stage.DORMANT, NO_BLUEPRINT, 0))
    for network, own in enumerate(given):
        for slot, kind, mode in own:
            stage[:, network, slot], blueprint[:, network, slot], blend[:, network, slot] = Stage.FOSSILIZED, kind, mode
    for change in sorted(log.changes, key=starts):
        where = slice(starts(change), None), change.environment, change.slot
        stage[where] = now = Stage[change.after.upper()]
        named = _OWNING[now] and change.blueprint is not None
        blueprint[where] = suite.blueprints.index(change.blueprint) if named else NO_BLUEPRINT
        if now is Stage.GERMINATED:
            blend[where] = log.steps[change.step][change.environment, Head.BLEND]
    fossils: list[Fossils] = [
        tuple(
            SeedKind(slot, int(blueprint[-1, network, slot]), Blend(blend[-1, network, slot]))
            for slot in np.flatnonzero(stage[-1, network] == Stage.FOSSILIZED).tolist()
        )
        for network in range(len(log.instances))
    ]
    return SlotHistory(stage[:-1], blueprint[:-1], blend[:-1], fossils)


class Prices:
    """FLOPs of one forward pass for one example of a suite's hosts and seeds; a multiply-add counts two."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._sites = Execution(suite.template(), suite.sites, torch.zeros(2, *suite.input_shape)).sites
        self._known: dict[tuple[int, ...], tuple[int, Cost]] = {}

    def host(self, instance: Instance) -> int:
        """What the instance's host takes."""
        return self._price(instance)[0]

    def sites(self, instance: Instance) -> list[Site]:
        """Where the instance's seeds live."""
        return [site.with_width(width) for site, width in zip(self._sites, instance.widths, strict=True)]

    def seeds(self, instance: Instance) -> Cost:
        """What seeds in the host's slots add, for E = 1."""
        return self._price(instance)[1]

    def network(self, instance: Instance, fossils: Fossils) -> int:
        """What the host with fossils takes."""
        seeds = self.seeds(instance)
        of_fossils = [
            seeds.blueprints[0, one.slot, one.blueprint] + seeds.blends[0, one.slot, one.blend] for one in fossils
        ]
        return self.host(instance) + int(sum(of_fossils))

    def _price(self, instance: Instance) -> tuple[int, Cost]:
        """Hosts of equal widths cost the same, and counting takes milliseconds."""
        widths = instance.widths
        if widths not in self._known:
            sites = self.sites(instance)
            kinds = [get(name) for name in self._suite.blueprints]
            seeds = [[kind.flops_at(site) if kind.supports(site) else 0 for kind in kinds] for site in sites]
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
    each = [prices.seeds(instance) for instance in instances]
    cost = merge_arrays(np.concatenate, each).of(slots.blueprint, slots.blend)
    parameters = host + (cost * _BLENDED[slots.stage]).sum(-1)
    isolated = slots.stage == Stage.TRAINING
    second = np.where(isolated.any(-1), parameters + (cost * isolated).sum(-1), 0)
    return TRAINING_PASSES * examples_per_decision(suite) * (parameters + second) * running


@dataclass(frozen=True)
class MeasuredArm:
    """What a controller did on its instances, and what it came to."""

    outcomes: list[Result]
    slots: list[SlotHistory]
    """One per cohort."""
    flops: list[int]
    """What each network's training took."""


def measure_arm(played: EvaluationResult, suite: Suite) -> MeasuredArm:
    """FLOPs and slots of the episodes that a controller has played."""
    slots = [track_slots(log, suite) for log in played.logs]
    prices = Prices(suite)
    flops = [
        training_flops(suite, prices, log.instances, own, np.stack(log.running)).sum(0)
        for log, own in zip(played.logs, slots, strict=True)
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
    episodes = terms.create_episodes(instances, suite=suite, fossils=fossils)
    log, waiting = EpisodeLog(suite, instances), make_wait_actions(len(instances))
    finals: dict[int, FinalScore] = {}
    for decision in range(1, suite.steps + 1):
        log.add(waiting, episodes.step(waiting))
        if decision in ends:
            finals[decision] = episodes.final_score()
    slots = track_slots(log, suite, fossils)
    spent = training_flops(suite, Prices(suite), instances, slots, np.stack(log.running)).cumsum(0)
    hosts = episodes.population.host_parameters
    return [
        make_result(task.arm, instance, finals[end], row, int(hosts[row]), int(spent[end - 1, row]))
        for row, (instance, end) in enumerate(zip(instances, ends.tolist(), strict=True))
    ]


def lengthen(suite: Suite, steps: int) -> Suite:
    """The suite with episodes of another length; their data begin in the same order."""
    changed = copy.copy(suite)
    changed.steps = steps
    return changed
