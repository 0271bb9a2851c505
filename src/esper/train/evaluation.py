"""Let controllers play instances to the end, and score what they committed on test data.

Every controller plays the same instances, in cohorts of networks side by side; what an evaluation that was stopped has
finished is kept, and not played again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from esper.config.loading import load_settings
from esper.config.settings import Settings
from esper.control.controller import Actions, Controller, PromiseReader
from esper.control.learned import LearnedController, PolicyOrigin, restore_controller
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
from esper.control.shipped import ESPER, open_policy
from esper.engine.config import EpisodeConfig
from esper.engine.observation import Observation
from esper.engine.promises import PromiseSettings
from esper.errors import RunError
from esper.lifecycle.rules import Rules
from esper.numerics.devices import CPU, require_device
from esper.population.forward import select_committed
from esper.population.population import Fossils, Strategy
from esper.population.shapley import ACCURACY, LOSS, attribute_networks
from esper.rl.episodes import Episodes, FinalScore
from esper.rl.rewards import RewardSettings
from esper.serialization.checkpoints import Checkpoints
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.episode_log import EpisodeLog, log_from_json, log_to_json
from esper.train.results import KeptPair, Result, SeedShapley, SeedValue, cache_key, read_cached, write_cached
from esper.train.settings import TrainSettings
from esper.train.workers import DeviceTask, Workers, explain_out_of_memory

_TUNED = Path(__file__).parent / "tuned"

Places = tuple[tuple[int, int], ...]
"""Slot and blueprint indices."""


class BaselineSettings(Settings):
    """What the tunable baselines do on one suite."""

    all_at_start: Places
    """One planting per slot."""
    schedule: Places
    """The best fixed schedule found, planted as early as can be."""
    periodic: PeriodicSettings
    heuristic: HeuristicSettings
    look: LookSettings = LookSettings()
    """As everywhere: nothing in it is of one suite."""
    environment_steps: dict[str, int] = {}
    """Decisions of single networks that the search for each controller took; who is not named was not searched for."""


def load_baseline_settings(suite: Suite) -> BaselineSettings:
    """The suite's tuned settings, or untuned ones that try everything in turn."""
    path = _TUNED / f"{suite.name}.yaml"
    if path.exists():
        return load_settings(BaselineSettings, path, ())
    slots, kinds = range(len(suite.sites)), range(len(suite.blueprints))
    one_each = tuple((slot, slot % len(kinds)) for slot in slots)
    every = tuple((slot, kind) for kind in kinds for slot in slots)
    return BaselineSettings(
        all_at_start=one_each,
        schedule=one_each[:1],
        periodic=PeriodicSettings(plantings=every),
        heuristic=HeuristicSettings(preferences=every),
    )


def create_baselines(suite: Suite) -> list[Controller]:
    """All of them: none, random, all_at_start, schedule, periodic, heuristic, look, and the shipped esper."""
    settings = load_baseline_settings(suite)
    return [
        Never(),
        Uniform(),
        Schedule(_at_once(settings.all_at_start), suite.steps, "all_at_start"),
        Schedule(_at_once(settings.schedule), suite.steps, "schedule"),
        Periodic(settings.periodic, suite.steps),
        Heuristic(settings.heuristic, suite.steps),
        LookRule(settings.look, suite.steps),
        load_shipped(suite),
    ]


def load_shipped(suite: Suite) -> LearnedController:
    """The policy that comes with Esper, for a suite that it need not have seen."""
    run = open_policy(ESPER)
    origin = load_settings(PolicyOrigin, run.config)
    return restore_controller(run, origin, lambda rule: LookRule(rule, suite.steps), ESPER)


def _at_once(places: Places) -> list[Planting]:
    return [Planting(0, slot, blueprint) for slot, blueprint in places]


COHORT = 64
"""Networks played side by side."""
_COALITION_ORDERS = 0
"""Seed of the orders that are drawn where a network has kept too many seeds for all coalitions."""
_EARNINGS = TypeAdapter(list[SeedShapley])


@dataclass(frozen=True)
class EvaluationResult:
    """The records of a list of instances, in its order, and what happened on the way."""

    records: list[Result]
    logs: list[EpisodeLog]
    earnings: list[SeedShapley] = field(default_factory=list[SeedShapley])
    """One per record if they were asked for, otherwise none."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "records": [one.to_json() for one in self.records],
            "logs": [log_to_json(one) for one in self.logs],
            "earnings": [asdict(one) for one in self.earnings],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], suite: Suite, instances: Sequence[Instance]) -> EvaluationResult:
        """What `to_json` gave of one cohort's episodes on these instances.

        Raises:
            ValueError, LookupError, TypeError: it gave something else.
        """
        return cls(
            [Result(**record) for record in values["records"]],
            [log_from_json(log, suite, instances) for log in values["logs"]],
            _EARNINGS.validate_python(values["earnings"]),
        )


@dataclass(frozen=True)
class Part:
    """A controller and the instances it is to play."""

    controller: Controller
    instances: Sequence[Instance]


@dataclass(frozen=True)
class EvaluationConfig:
    """What holds for all who play."""

    suite: str
    rules: Rules
    conduct: EpisodeConfig = EpisodeConfig()
    device: str = CPU
    """Where networks are computed, as torch names it; controllers decide on the CPU."""
    networks_per_pass: int | None = None
    strategy: Strategy = "stacked"

    def for_controller(self, controller: Controller) -> EvaluationConfig:
        """These terms with promises measured as the controller says, if it does; they change nothing but what is
        seen."""
        return self.with_promise(controller.promise) if isinstance(controller, PromiseReader) else self

    def with_promise(self, promise: PromiseSettings | None) -> EvaluationConfig:
        """These terms with promises measured in that way, or not at all."""
        return replace(self, conduct=self.conduct.model_copy(update={"promise": promise}))

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
            device=require_device(self.device),
        )


def make_evaluation_config(settings: TrainSettings, device: str | None = None) -> EvaluationConfig:
    """Those of a training run, on its first device or another one."""
    return EvaluationConfig(
        settings.suite,
        settings.rules,
        settings.conduct,
        settings.devices[0] if device is None else device,
        settings.networks_per_pass,
        settings.strategy,
    )


@dataclass(frozen=True)
class CohortTask(DeviceTask):
    """Parts that are played side by side, as one cohort; any process may compute it."""

    terms: EvaluationConfig
    parts: Sequence[Part]
    attributed: bool = False
    """Whether to tell what the kept seeds earned."""

    @property
    def device(self) -> str:
        return self.terms.device


@explain_out_of_memory()
def evaluate_cohort(task: CohortTask) -> list[EvaluationResult]:
    """Play all parts, each by its controller. What is random in a controller follows from the instance's seed.

    Raises:
        RunError: the device's memory ran out.
    """
    terms, suite = task.terms, get_suite(task.terms.suite)
    instances = [instance for part in task.parts for instance in part.instances]
    episodes = terms.create_episodes(instances)
    ends = np.cumsum([len(part.instances) for part in task.parts]).tolist()
    places = [slice(end - len(part.instances), end) for part, end in zip(task.parts, ends, strict=True)]
    log = EpisodeLog(suite, instances)
    states = [part.controller.start([instance.seed for instance in part.instances]) for part in task.parts]
    while not episodes.finished.all():
        observation, masks = episodes.observe(), episodes.legal_actions()
        actions: list[Actions] = []
        for index, (part, place) in enumerate(zip(task.parts, places, strict=True)):
            seen = Observation(*(features[place] for features in observation))
            chosen, states[index] = part.controller.act(seen, masks.rows(place), states[index])
            actions.append(chosen)
        joint = np.concatenate(actions)
        log.add(joint, episodes.step(joint))
    log.finish(episodes)
    final = episodes.final_score()
    earned = attribute_kept_seeds(episodes) if task.attributed else []
    hosts: list[int] = episodes.population.host_parameters.tolist()
    records = [
        make_result(part.controller.name, instance, final, row, hosts[row])
        for part, place in zip(task.parts, places, strict=True)
        for row, instance in enumerate(part.instances, start=place.start)
    ]
    return [EvaluationResult(records[place], [log.part(place)], earned[place]) for place in places]


def attribute_kept_seeds(episodes: Episodes) -> list[SeedShapley]:
    """Shapley values of the kept seeds of finished episodes, on the validation data of their last phase.

    What is only reported needs no test data. Where growth is about the loss, values are shares of a guess's loss.
    """
    population, suite = episodes.population, episodes.suite
    rng = np.random.default_rng(_COALITION_ORDERS)
    attribution = attribute_networks(population, episodes.validation, rng, select_committed(population))
    metric, unit = (ACCURACY, 1.0) if suite.objective == "accuracy" else (LOSS, suite.chance_loss)
    values, errors = attribution.values[metric] / unit, attribution.errors[metric] / unit
    interactions = attribution.interactions[metric] / unit
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
    """What a controller or another arm came to on an instance, whose network is row ``row`` of ``final``."""
    return Result(
        controller,
        instance.name,
        instance.family,
        instance.variant,
        float(final.score[row]),
        float(final.accuracy[row]),
        int(final.added_parameters[row]),
        host_parameters,
        flops=flops,
    )


def split_into_cohorts(
    controllers: Sequence[Controller],
    terms: EvaluationConfig,
    instances: Sequence[Instance],
    *,
    attributed: bool = False,
) -> list[CohortTask]:
    """Every controller on every instance, as tasks, ``attributed`` or not.

    Cohorts are filled with the parts of several controllers where there are fewer instances than `COHORT`, as far as
    neighbours see alike.
    """
    size = min(COHORT, len(instances))
    together = max(COHORT // size, 1)
    tasks: list[CohortTask] = []
    for own, several in groupby(controllers, terms.for_controller):
        parts = [
            Part(controller, instances[start : start + size])
            for controller in several
            for start in range(0, len(instances), size)
        ]
        tasks += [CohortTask(own, parts[at : at + together], attributed) for at in range(0, len(parts), together)]
    return tasks


def join_cohorts(controllers: int, played: Sequence[Sequence[EvaluationResult]]) -> list[EvaluationResult]:
    """What the cohorts of that many controllers led to, put together for each."""
    parts = [part for cohort in played for part in cohort]
    each = len(parts) // controllers
    return [
        EvaluationResult(
            [record for one in own for record in one.records],
            [log for one in own for log in one.logs],
            [earned for one in own for earned in one.earnings],
        )
        for own in (parts[start : start + each] for start in range(0, len(parts), each))
    ]


def evaluate_controllers(
    workers: Workers, controllers: Sequence[Controller], terms: EvaluationConfig, instances: Sequence[Instance]
) -> list[EvaluationResult]:
    """Every controller on every instance; the results in the order of the controllers."""
    if not controllers:
        return []
    tasks = split_into_cohorts(controllers, terms, instances)
    return join_cohorts(len(controllers), workers.map(evaluate_cohort, tasks))


def compute_mean_score(played: EvaluationResult) -> float:
    """Mean score over the instances."""
    return float(np.mean([record.score for record in played.records]))


def describe_evaluation_inputs(settings: TrainSettings, policy: str) -> list[Any]:
    """All that results follow from besides versions, controllers' names and instances; ``policy`` is its hash."""
    settings_of_rules, shipped = (
        load_baseline_settings(get_suite(settings.suite)),
        Checkpoints(open_policy(ESPER).checkpoints).latest(),
    )
    return [settings.model_dump(mode="json"), settings_of_rules.model_dump(mode="json"), policy, shipped.sha256]


class EvaluationProgress:
    """A folder with a file per finished cohort, named by all that its result follows from."""

    def __init__(self, folder: Path, circumstances: Any, tasks: Sequence[CohortTask]) -> None:
        """Take over what was played of ``tasks`` under these circumstances; everything else in the folder is removed.

        Raises:
            RunError: the folder cannot be used.
        """
        self._folder, self._circumstances = folder, circumstances
        cached = {self._key(task): self._read(task) for task in tasks}
        self._known = {key: played for key, played in cached.items() if played is not None}
        try:
            folder.mkdir(exist_ok=True)
            for path in set(folder.iterdir()) - set(map(self._path, self._known)):
                path.unlink()
        except OSError as error:
            raise RunError(f"cannot use {folder} ({error.strerror}): delete it and try again") from error

    @property
    def taken_over(self) -> int:
        """How many cohorts need not be played."""
        return len(self._known)

    def play(self, workers: Workers, tasks: Sequence[CohortTask]) -> list[list[EvaluationResult]]:
        """Play what is not known yet, and keep each cohort as soon as it is."""
        keys = [self._key(task) for task in tasks]
        missing = [index for index, key in enumerate(keys) if key not in self._known]
        for place, played in workers.as_completed(evaluate_cohort, [tasks[index] for index in missing]):
            key = keys[missing[place]]
            write_cached(self._path(key), key, [one.to_json() for one in played])
            self._known[key] = played
        return [self._known[key] for key in keys]

    def remove(self) -> None:
        """Forget it all: the evaluation has its results."""
        try:
            shutil.rmtree(self._folder)
        except OSError as error:
            raise RunError(f"cannot delete {self._folder} ({error.strerror}): delete it by hand") from error

    def _key(self, task: CohortTask) -> str:
        parts = [[part.controller.name, [one.to_json() for one in part.instances]] for part in task.parts]
        return cache_key(self._circumstances, parts, task.attributed)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _read(self, task: CohortTask) -> list[EvaluationResult] | None:
        def decode(played: list[dict[str, Any]]) -> list[EvaluationResult]:
            suite, pairs = get_suite(task.terms.suite), zip(played, task.parts, strict=True)
            return [EvaluationResult.from_json(one, suite, part.instances) for one, part in pairs]

        key = self._key(task)
        return read_cached(self._path(key), key, decode)
