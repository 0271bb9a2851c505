"""Networks of fixed shape: results of the same modules without control, and the cost of training in FLOPs.

Measurements are never counted.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from esper.engine.budget import TRAINING_PASSES, Cost
from esper.growth.blueprints.registry import get
from esper.growth.site import Site
from esper.lifecycle.actions import Blend, Head, make_wait_actions
from esper.lifecycle.table import BLENDED, NO_BLUEPRINT, OWNING, Stage, make_stage_lookup
from esper.lifecycle.transitions import Cause
from esper.numerics.arrays import Bools, Floats, Ints, merge_arrays
from esper.population.execution import Execution
from esper.population.parameters import SeedKind
from esper.population.population import Fossils
from esper.rl.episodes import FinalScore
from esper.runs.events import LifecycleTransition
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import COHORT, EvaluationConfig, EvaluationResult, make_result
from esper.train.recorder import EpisodeLog, EpisodeRecorder
from esper.train.results import Result
from esper.train.workers import DeviceTask, Workers

_OWNING, _BLENDED = make_stage_lookup(OWNING), make_stage_lookup(BLENDED)
_ROLLBACK = Cause.ROLLBACK.name.lower()


# What training costs


@dataclass(frozen=True)
class SlotHistory:
    """The slots of E networks over T decisions, ``[T, E, S]``."""

    stage: Ints
    """``[T, E, S]``: the `Stage` during the training after each decision."""
    blueprint: Ints
    """Index of the blueprint in the suite; -1 without a seed."""
    blend: Ints
    """``[T, E, S]``: the seed's `Blend`."""
    fossils: list[Fossils]
    """Committed seeds of each network at the end, ``[E]``."""


def track_slots(log: EpisodeLog, suite: Suite, fossils: Sequence[Fossils] = ()) -> SlotHistory:
    """The contents of the slots in finished episodes, which started with these fossils."""

    def first_step(change: LifecycleTransition) -> int:
        # A rollback happens after the training of its decision, so the next training is the first without the seed.
        return change.step + (change.cause == _ROLLBACK)

    # Write a change from its step to the end; later changes overwrite it.
    shape = (len(log.steps) + 1, len(log.instances), len(suite.sites))  # with the end of the episodes
    stage, blueprint, blend = (np.full(shape, initial, np.int64) for initial in (Stage.DORMANT, NO_BLUEPRINT, 0))
    for network, seeds in enumerate(fossils):
        for slot, kind, mode in seeds:
            stage[:, network, slot], blueprint[:, network, slot], blend[:, network, slot] = Stage.FOSSILIZED, kind, mode
    for change in sorted(log.changes, key=first_step):
        where = slice(first_step(change), None), change.environment, change.slot
        stage[where] = after = Stage[change.after.upper()]
        occupied = _OWNING[after] and change.blueprint is not None
        blueprint[where] = suite.blueprints.index(change.blueprint) if occupied else NO_BLUEPRINT
        if after is Stage.GERMINATED:
            blend[where] = log.steps[change.step][change.environment, Head.BLEND]
    committed: list[Fossils] = [
        tuple(
            SeedKind(slot, int(blueprint[-1, network, slot]), Blend(blend[-1, network, slot]))
            for slot in np.flatnonzero(stage[-1, network] == Stage.FOSSILIZED).tolist()
        )
        for network in range(len(log.instances))
    ]
    return SlotHistory(stage[:-1], blueprint[:-1], blend[:-1], committed)


class Prices:
    """FLOPs of a forward pass of a suite's hosts and seeds for one example; a multiply-add counts as two."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self.examples = suite.batches_per_step * suite.batch_size
        """Of a network after each decision."""
        self._sites = Execution(suite.template(), suite.sites, torch.zeros(2, *suite.input_shape)).sites
        self._counts: dict[tuple[int, ...], tuple[list[Site], int, Cost]] = {}
        """By widths: hosts of equal widths cost the same, and counting takes milliseconds."""

    def count(self, instance: Instance) -> tuple[list[Site], int, Cost]:
        """Sites of the seeds in the instance's host, its FLOPs, and those that seeds add there, with E = 1."""
        widths = instance.widths
        if widths not in self._counts:
            host, kinds = self._suite.host(instance), [get(name) for name in self._suite.blueprints]
            sites = [site.find_in(host, width) for site, width in zip(self._sites, widths, strict=True)]
            seeds = [[kind.cost_at(site).flops if kind.supports(site) else 0 for kind in kinds] for site in sites]
            self._counts[widths] = sites, self._suite.flops(instance), Cost.of_blueprints(np.array([seeds]))
        return self._counts[widths]

    def network(self, instance: Instance, fossils: Fossils) -> int:
        """FLOPs of the host with fossils."""
        _, host, seeds = self.count(instance)
        return host + int(
            sum(
                seeds.blueprints[0, fossil.slot, fossil.blueprint] + seeds.blends[0, fossil.slot, fossil.blend]
                for fossil in fossils
            )
        )

    def count_training(self, instances: Sequence[Instance], slots: SlotHistory, running: Bools) -> Ints:
        """FLOPs of each network's training after each decision, ``[T, E]``; 0 where it is not ``running [T, E]``.

        Seeds that train in isolation cost a second pass through the network.
        """
        counts = [self.count(instance) for instance in instances]
        host = np.array([flops for _, flops, _ in counts])
        cost = merge_arrays(np.concatenate, [seeds for _, _, seeds in counts]).of(slots.blueprint, slots.blend)
        forward = host + (cost * _BLENDED[slots.stage]).sum(-1)
        isolated = slots.stage == Stage.TRAINING
        second = np.where(isolated.any(-1), forward + (cost * isolated).sum(-1), 0)
        return TRAINING_PASSES * self.examples * (forward + second) * running


@dataclass(frozen=True)
class MeasuredArm:
    """A controller's results, with the final fossils and the training FLOPs of each network."""

    outcomes: list[Result]
    fossils: list[Fossils]
    """Final fossils of each network."""
    flops: list[int]
    """FLOPs of each network's training."""


def measure_arm(played: EvaluationResult, suite: Suite) -> MeasuredArm:
    """Add the costs of training and the final networks to a controller's episodes."""
    prices = Prices(suite)
    fossils, flops = list[Fossils](), list[int]()
    for log in played.logs:
        slots = track_slots(log, suite)
        fossils += slots.fossils
        flops += prices.count_training(log.instances, slots, np.stack(log.running)).sum(0).tolist()
    outcomes = [replace(record, flops=cost) for record, cost in zip(played.records, flops, strict=True)]
    return MeasuredArm(outcomes, fossils, flops)


# Training networks of fixed shape


@dataclass(frozen=True)
class StaticNetwork:
    """A network to train from scratch, with new fossils, for the minibatches of so many decisions."""

    instance: Instance
    fossils: Fossils
    """Newly initialised modules at alpha 1."""
    decisions: int
    """Length of the training, in units of the minibatches between two decisions."""


@dataclass(frozen=True)
class StaticTask(DeviceTask):
    """Networks that are trained side by side; any process may compute the task."""

    config: EvaluationConfig
    arm: str
    networks: Sequence[StaticNetwork]

    @property
    def device(self) -> str:
        return self.config.device


def train_static(
    workers: Workers, config: EvaluationConfig, arm: str, networks: Sequence[StaticNetwork]
) -> list[tuple[Result, Floats]]:
    """Train networks, each for its own number of decisions, in their order.

    Returns the result on test data, and J on validation data after each decision ``[T]``.
    """
    # Trainings of similar length run side by side.
    order = sorted(range(len(networks)), key=lambda index: networks[index].decisions)
    parts = [order[start : start + COHORT] for start in range(0, len(order), COHORT)]
    tasks = [StaticTask(config, arm, [networks[index] for index in part]) for part in parts]
    outcomes: dict[int, tuple[Result, Floats]] = {}
    for part, results in zip(parts, workers.map(train_cohort, tasks), strict=True):
        outcomes |= dict(zip(part, results, strict=True))
    return [outcomes[index] for index in range(len(networks))]


def train_cohort(task: StaticTask) -> list[tuple[Result, Floats]]:
    """Train a cohort to the end of its longest training, also beyond the horizon; score each at its own end."""
    ends = np.array([network.decisions for network in task.networks])
    suite = copy.copy(get_suite(task.config.suite))
    suite.steps = int(ends.max())  # the order of data starts in the same way, whatever the length
    instances = [network.instance for network in task.networks]
    fossils = [network.fossils for network in task.networks]
    # Networks that never change need no promises, and are trained to their own end.
    growth = task.config.growth.model_copy(update={"promise": None, "plateau": None})
    episodes = replace(task.config, growth=growth).create_episodes(instances, suite=suite, fossils=fossils)
    recorder, waiting = EpisodeRecorder(episodes), make_wait_actions(len(instances))
    curve: list[Floats] = []
    finals: dict[int, FinalScore] = {}
    for decision in range(1, suite.steps + 1):
        recorder.record_step(waiting, episodes.step(waiting))
        curve.append(episodes.potential)
        if decision in ends:
            finals[decision] = episodes.final_score()
    log = recorder.log
    slots = track_slots(log, suite, fossils)
    flops = Prices(suite).count_training(instances, slots, np.stack(log.running)).cumsum(0)
    hosts, validation = episodes.population.host_parameters, np.stack(curve, 1)
    results = [
        make_result(task.arm, instance, finals[end], row, int(hosts[row]), int(flops[end - 1, row]))
        for row, (instance, end) in enumerate(zip(instances, ends.tolist(), strict=True))
    ]
    return [(result, validation[row, :end]) for row, (result, end) in enumerate(zip(results, ends, strict=True))]
