"""Evaluate controllers: run episodes on instances, and score the committed networks on test data.

Every controller runs on the same instances, in cohorts of networks side by side, which `EvaluationProgress` stores.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from esper.config.loading import load_settings
from esper.config.settings import Settings
from esper.control.controller import Actions, Controller, PromiseReader
from esper.control.rules import (
    Heuristic,
    HeuristicSettings,
    LookRule,
    LookSettings,
    Never,
    Periodic,
    PeriodicSettings,
    Planting,
    Schedule,
    Uniform,
)
from esper.engine.engine import GrowthConfig
from esper.engine.observation import Observation
from esper.errors import RunError
from esper.growth.promise import PromiseSettings
from esper.lifecycle.rules import Rules
from esper.numerics.devices import CPU, prepare_device
from esper.population.forward import select_committed
from esper.population.population import Fossils, Strategy
from esper.population.shapley import ACCURACY, LOSS, attribute_networks
from esper.rl.episodes import Episodes, FinalScore
from esper.rl.rewards import RewardSettings
from esper.runs.store import EventRow, encode_events
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.recorder import EpisodeLog, EpisodeRecorder
from esper.train.results import KeptPair, Result, SeedShapley, SeedValue, cache_key, read_cached, write_cached
from esper.train.settings import TrainSettings
from esper.train.workers import DeviceTask, Workers, explain_device_errors

_TUNED = Path(__file__).parent / "tuned"

Plantings = tuple[tuple[int, int], ...]
"""Slot and blueprint indices."""


class BaselineSettings(Settings):
    """The settings of the tunable baselines on one suite."""

    all_at_start: Plantings
    """Blueprints planted at the start, one per slot."""
    schedule: Plantings
    """The best fixed schedule found, planted as early as possible."""
    periodic: PeriodicSettings
    heuristic: HeuristicSettings
    look: LookSettings = LookSettings()
    """Settings of the look-ahead rule, the same on all suites."""
    environment_steps: dict[str, int] = {}
    """Number of decisions, over all networks, that the search for each controller's settings took, if there was one."""


def load_baseline_settings(suite: Suite) -> BaselineSettings:
    """The tuned settings of a suite, or untuned settings that try everything in turn."""
    path = _TUNED / f"{suite.name}.yaml"
    if path.exists():
        return load_settings(BaselineSettings, path, ())
    # Without tuned settings, plant every blueprint once in every slot, in turn.
    slots, blueprints = range(len(suite.sites)), range(len(suite.blueprints))
    one_each = tuple((slot, slot % len(blueprints)) for slot in slots)
    every_pair = tuple((slot, blueprint) for blueprint in blueprints for slot in slots)
    return BaselineSettings(
        all_at_start=one_each,
        schedule=one_each[:1],
        periodic=PeriodicSettings(plantings=every_pair),
        heuristic=HeuristicSettings(preferences=every_pair),
    )


def create_baselines(suite: Suite) -> list[Controller]:
    """All baselines: none, random, all_at_start, schedule, periodic, heuristic and look."""
    settings = load_baseline_settings(suite)

    def plant_at_start(plantings: Plantings, name: str) -> Schedule:
        return Schedule([Planting(0, slot, blueprint) for slot, blueprint in plantings], suite.steps, name)

    return [
        Never(),
        Uniform(),
        plant_at_start(settings.all_at_start, "all_at_start"),
        plant_at_start(settings.schedule, "schedule"),
        Periodic(settings.periodic, suite.steps),
        Heuristic(settings.heuristic, suite.steps),
        LookRule(settings.look, suite.steps),
    ]


COHORT = 64
"""Number of networks in a cohort."""
_COALITION_ORDERS = 0
"""Random seed of the orders drawn for a network with too many kept modules to measure all coalitions."""
_SHAPLEY = TypeAdapter(list[SeedShapley])
ShapleyMethod = Literal["orders", "pairs"]
"""How Shapley values are estimated for a network with too many kept modules to measure all coalitions: from random
orders, with standard errors, or from pairs of modules for a tenth of the cost, with interactions."""


@dataclass(frozen=True)
class EvaluationResult:
    """A controller's results on a list of instances, in the order of the list, and the logs of the episodes."""

    records: list[Result]
    logs: list[EpisodeLog]
    earnings: list[SeedShapley] = field(default_factory=list[SeedShapley])
    """Shapley values of the kept seeds, one entry per result; empty if they were not computed."""
    events: list[EventRow] = field(default_factory=list[EventRow])
    """The events of the episodes; empty if only logs were kept."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, which `from_json` reads."""
        return {
            "records": [record.to_json() for record in self.records],
            "logs": [log.to_json() for log in self.logs],
            "earnings": [asdict(shapley) for shapley in self.earnings],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], suite: Suite, instances: Sequence[Instance]) -> EvaluationResult:
        """Inverse of `to_json` for one cohort's episodes on these instances."""
        return cls(
            [Result(**record) for record in values["records"]],
            [EpisodeLog.from_json(log, suite, instances) for log in values["logs"]],
            _SHAPLEY.validate_python(values["earnings"]),
        )


class CohortPart(NamedTuple):
    """A controller and the instances on which it runs."""

    controller: Controller
    instances: Sequence[Instance]


@dataclass(frozen=True)
class EvaluationConfig:
    """The settings of episodes that all controllers of an evaluation share."""

    suite: str
    rules: Rules
    growth: GrowthConfig = GrowthConfig()
    device: str = CPU
    """Torch's name of the device that computes networks; controllers decide on the CPU."""
    deterministic: bool = True
    """See `esper.numerics.devices.prepare_device`."""
    networks_per_pass: int | None = None
    examples_per_pass: int | None = None
    bf16: bool = False
    strategy: Strategy = "stacked"

    def for_controller(self, controller: Controller) -> EvaluationConfig:
        """This configuration, with promises measured as the controller needs them; they affect only observations."""
        return self.with_promise(controller.promise) if isinstance(controller, PromiseReader) else self

    def with_promise(self, promise: PromiseSettings | None) -> EvaluationConfig:
        """This configuration, with promises measured by these settings; None: not measured."""
        return replace(self, growth=self.growth.model_copy(update={"promise": promise}))

    def create_episodes(
        self,
        instances: Sequence[Instance],
        *,
        suite: Suite | None = None,
        rewards: Sequence[RewardSettings] = (),
        fossils: Sequence[Fossils] = (),
    ) -> Episodes:
        """Episodes of this configuration, on ``suite`` or, without it, on the configuration's own suite."""
        return Episodes(
            suite or get_suite(self.suite),
            instances,
            self.rules,
            self.growth,
            rewards=rewards,
            fossils=fossils,
            strategy=self.strategy,
            networks_per_pass=self.networks_per_pass,
            examples_per_pass=self.examples_per_pass,
            bf16=self.bf16,
            device=prepare_device(self.device, deterministic=self.deterministic),
        )


_OF_A_RUN = tuple(field.name for field in fields(EvaluationConfig) if field.name != "device")


def make_evaluation_config(settings: TrainSettings, device: str | None = None) -> EvaluationConfig:
    """The configuration of a training run's episodes, on the run's first device unless ``device`` is given."""
    own = {name: getattr(settings, name) for name in _OF_A_RUN}
    return EvaluationConfig(**own, device=device or settings.devices[0])


@dataclass(frozen=True)
class CohortTask(DeviceTask):
    """Parts that run side by side, as one cohort; any process may compute it."""

    config: EvaluationConfig
    parts: Sequence[CohortPart]
    shapley: ShapleyMethod | None = None
    """How to compute the Shapley values of the kept seeds; None: not at all."""
    first_environment: int | None = None
    """Number of the first network in the run that records the episodes of the only part; None: only logs are kept."""

    @property
    def device(self) -> str:
        return self.config.device


@explain_device_errors()
def evaluate_cohort(task: CohortTask) -> list[EvaluationResult]:
    """Run all parts, each with its controller, whose random choices depend only on the instance's random seed."""
    parts = task.parts
    episodes = task.config.create_episodes([instance for part in parts for instance in part.instances])
    ends = np.cumsum([len(part.instances) for part in parts]).tolist()
    part_rows = [slice(end - len(part.instances), end) for part, end in zip(parts, ends, strict=True)]

    # All networks take their steps together; each controller decides for the rows of its part.
    recorder = EpisodeRecorder(episodes)
    if task.first_environment is not None:
        recorder = EpisodeRecorder(episodes, 1, events="steps", first_environment=task.first_environment)
    events = encode_events(recorder.record_start())
    states = [part.controller.start([instance.seed for instance in part.instances]) for part in parts]
    while not episodes.finished.all():
        observation, masks = episodes.observe(), episodes.legal_actions()
        actions: list[Actions] = []
        for index, (part, rows) in enumerate(zip(parts, part_rows, strict=True)):
            part_observation = Observation(*(features[rows] for features in observation))
            action, states[index] = part.controller.act(part_observation, masks.rows(rows), states[index])
            actions.append(action)
        joint = np.concatenate(actions)
        events += encode_events(recorder.record_step(joint, episodes.step(joint)))
    log = recorder.finish()

    # Score the committed networks on test data, which is used nowhere above.
    final = episodes.final_score()
    shapley = attribute_kept_seeds(episodes, task.shapley) if task.shapley is not None else []
    host_parameters: list[int] = episodes.population.host_parameters.tolist()
    records = [
        make_result(part.controller.name, instance, final, row, host_parameters[row])
        for part, rows in zip(parts, part_rows, strict=True)
        for row, instance in enumerate(part.instances, start=rows.start)
    ]
    return [EvaluationResult(records[rows], [log.select_rows(rows)], shapley[rows], events) for rows in part_rows]


def attribute_kept_seeds(episodes: Episodes, method: ShapleyMethod) -> list[SeedShapley]:
    """Shapley values of the kept seeds of finished episodes, on the validation data of their last phase.

    They are in units of the suite's objective: accuracy, or the loss as a fraction of the loss of guessing.
    """
    population, suite = episodes.population, episodes.suite
    rng = np.random.default_rng(_COALITION_ORDERS) if method == "orders" else None
    attribution = attribute_networks(population, episodes.validation, rng, select_committed(population))
    metric, unit = (ACCURACY, 1.0) if suite.objective == "accuracy" else (LOSS, suite.chance_loss)
    values, errors = attribution.values[metric] / unit, attribution.errors[metric] / unit
    interactions = attribution.interactions[metric] / unit

    # One entry per episode: the kept seeds, and the pairs whose interaction was computed.
    shapley: list[SeedShapley] = []
    for row, instance in enumerate(episodes.instances):
        blueprints: list[int] = population.table.blueprint[row].tolist()
        slots: list[int] = np.flatnonzero(attribution.players[row]).tolist()
        seeds = [
            SeedValue(slot, suite.blueprints[blueprints[slot]], float(values[row, slot]), float(errors[row, slot]))
            for slot in slots
        ]
        pairs = [
            KeptPair(first, second, float(interactions[row, first, second]))
            for first, second in combinations(slots, 2)
            if np.isfinite(interactions[row, first, second])
        ]
        shapley.append(SeedShapley(instance.name, instance.family, tuple(seeds), tuple(pairs)))
    return shapley


def make_result(
    controller: str, instance: Instance, final: FinalScore, row: int, host_parameters: int, flops: int | None = None
) -> Result:
    """The result of a controller or another arm on an instance, from row ``row`` of ``final``."""
    return Result(
        controller=controller,
        instance=instance.name,
        family=instance.family,
        variant=instance.variant,
        score=float(final.score[row]),
        test_accuracy=float(final.accuracy[row]),
        added_parameters=int(final.added_parameters[row]),
        host_parameters=host_parameters,
        flops=flops,
    )


def split_into_cohorts(
    controllers: Sequence[Controller],
    config: EvaluationConfig,
    instances: Sequence[Instance],
    *,
    shapley: ShapleyMethod | None = None,
) -> list[CohortTask]:
    """Split the evaluation of every controller on every instance into tasks of about `COHORT` networks.

    Consecutive controllers share a cohort if few instances leave room, and the same promises are measured for them.
    """
    size = min(COHORT, len(instances))
    parts_per_cohort = max(COHORT // size, 1)
    tasks: list[CohortTask] = []
    for shared_config, neighbours in groupby(controllers, config.for_controller):
        parts = [
            CohortPart(controller, instances[start : start + size])
            for controller in neighbours
            for start in range(0, len(instances), size)
        ]
        tasks += [
            CohortTask(shared_config, parts[start : start + parts_per_cohort], shapley)
            for start in range(0, len(parts), parts_per_cohort)
        ]
    return tasks


def join_cohorts(controllers: int, cohorts: Sequence[Sequence[EvaluationResult]]) -> list[EvaluationResult]:
    """Join the results of cohorts by controller: each of them has the same number of parts, one after the other."""
    results = [result for cohort in cohorts for result in cohort]
    count = len(results) // controllers
    return [
        EvaluationResult(
            [record for result in part for record in result.records],
            [log for result in part for log in result.logs],
            [shapley for result in part for shapley in result.earnings],
            [event for result in part for event in result.events],
        )
        for part in (results[start : start + count] for start in range(0, len(results), count))
    ]


def evaluate_controllers(
    workers: Workers,
    controllers: Sequence[Controller],
    config: EvaluationConfig,
    instances: Sequence[Instance],
    *,
    shapley: ShapleyMethod | None = None,
) -> list[EvaluationResult]:
    """Evaluate every controller on every instance; the results are in the order of the controllers."""
    if not controllers:
        return []
    tasks = split_into_cohorts(controllers, config, instances, shapley=shapley)
    return join_cohorts(len(controllers), workers.map(evaluate_cohort, tasks))


def compute_mean_score(result: EvaluationResult) -> float:
    """Mean score over the instances."""
    return float(np.mean([record.score for record in result.records]))


def describe_evaluation_inputs(settings: TrainSettings, policy_hash: str) -> list[Any]:
    """All inputs of an evaluation except versions, names of controllers and instances, as JSON values."""
    baselines = load_baseline_settings(get_suite(settings.suite))
    return [settings.model_dump(mode="json"), baselines.model_dump(mode="json"), policy_hash]


class EvaluationProgress:
    """A folder with one file per finished cohort, named by a hash of all inputs of its results."""

    def __init__(self, folder: Path, inputs: Any, tasks: Sequence[CohortTask]) -> None:
        """Read the results of those ``tasks`` that are finished with these ``inputs``, and delete all other files."""
        self._folder, self._inputs = folder, inputs

        # Read the files of these tasks; damaged files are treated as missing.
        self._cohorts: dict[str, list[EvaluationResult]] = {}
        for task in tasks:
            key = self._compute_key(task)
            cohort = read_cached(self._path(key), key, partial(_decode_cohort, task))
            if cohort is not None:
                self._cohorts[key] = cohort

        # Delete all other files: they belong to other inputs or are incomplete.
        try:
            folder.mkdir(exist_ok=True)
            for path in set(folder.iterdir()) - set(map(self._path, self._cohorts)):
                path.unlink()
        except OSError as error:
            raise RunError(f"cannot use {folder} ({error.strerror}): delete it and try again") from error

    @property
    def cached_count(self) -> int:
        """Number of finished cohorts."""
        return len(self._cohorts)

    def evaluate_cohorts(self, workers: Workers, tasks: Sequence[CohortTask]) -> list[list[EvaluationResult]]:
        """The results of all tasks; unfinished ones are computed, and each is stored as soon as it is done."""
        keys = [self._compute_key(task) for task in tasks]
        missing = [index for index, key in enumerate(keys) if key not in self._cohorts]
        for position, cohort in workers.as_completed(evaluate_cohort, [tasks[index] for index in missing]):
            # Written at once, so that stopping the evaluation loses only the cohorts that are running.
            key = keys[missing[position]]
            write_cached(self._path(key), key, [result.to_json() for result in cohort])
            self._cohorts[key] = cohort
        return [self._cohorts[key] for key in keys]

    def remove(self) -> None:
        """Delete the folder, when the evaluation is complete."""
        try:
            shutil.rmtree(self._folder)
        except OSError as error:
            raise RunError(f"cannot delete {self._folder} ({error.strerror}): delete it by hand") from error

    def _compute_key(self, task: CohortTask) -> str:
        parts = [[part.controller.name, [instance.to_json() for instance in part.instances]] for part in task.parts]
        return cache_key(self._inputs, parts, task.shapley is not None)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _decode_cohort(task: CohortTask, values: list[dict[str, Any]]) -> list[EvaluationResult]:
    suite, parts = get_suite(task.config.suite), zip(values, task.parts, strict=True)
    return [EvaluationResult.from_json(value, suite, part.instances) for value, part in parts]
