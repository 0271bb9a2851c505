"""What a controller did in an evaluation: how it treats families, what kept seeds earned, a few whole episodes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, ConfigDict, TypeAdapter

from esper.files import write_atomically
from esper.lab.analysis import Interval, mean_interval
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.stages import Stage
from esper.tasks.suite import Split, Suite
from esper.train.episode_log import EpisodeLog, StageChange
from esper.train.evaluation import EvaluationResult
from esper.train.results import Result, SeedShapley, read_json

_GERMINATED, _KEPT = Stage.GERMINATED.name.lower(), Stage.FOSSILIZED.name.lower()


@dataclass(frozen=True)
class Plant:
    """How often a blueprint was used in a slot, per episode."""

    slot: int
    blueprint: str
    germinated: float
    kept: float


@dataclass(frozen=True)
class Usage:
    """What the controller did on one family."""

    family: str
    split: Split
    episodes: int
    operations: dict[str, float]
    """Share of decisions per operation."""
    plants: tuple[Plant, ...]
    """Plants that occurred."""


@dataclass(frozen=True)
class EpisodeTimeline:
    """One network's life: its validation accuracy after each decision and its slots' changes of stage."""

    instance: str
    family: str
    variant: str
    split: Split
    score: float
    growth: float
    """Committed parameters over the host's."""
    drift_step: int | None
    accuracy: tuple[float, ...]
    changes: tuple[StageChange, ...]


@dataclass(frozen=True)
class Behaviour:
    """What the policy of a run did in its evaluation."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)  # older files have more fields

    iteration: int
    """Training iterations that the policy had behind it."""
    sites: tuple[str, ...]
    blueprints: tuple[str, ...]
    usage: tuple[Usage, ...]
    episodes: tuple[EpisodeTimeline, ...]
    """The first of each family."""
    earnings: tuple[SeedShapley, ...] | None = None
    """What was kept in each episode; None in files from before this was measured."""


def describe_behaviour(suite: Suite, iteration: int, played: Sequence[tuple[Split, EvaluationResult]]) -> Behaviour:
    """Sum up what was played on the instances of each split."""
    usage: list[Usage] = []
    episodes: list[EpisodeTimeline] = []
    for split, one in played:
        families = sorted({record.family for record in one.records})
        usage += [_count_usage(family, split, one.logs) for family in families]
        episodes += [_find_first_episode(family, split, one) for family in families]
    earned = tuple(earnings for _, one in played for earnings in one.earnings)
    return Behaviour(iteration, suite.sites, suite.blueprints, tuple(usage), tuple(episodes), earned)


def write_behaviour(path: Path, behaviour: Behaviour) -> None:
    """Write it as JSON; RunError if that fails."""
    write_atomically(path, json.dumps(asdict(behaviour), indent=1))


def read_behaviour(path: Path) -> Behaviour:
    """What :func:`write_behaviour` wrote.

    Raises:
        RunError: the file is missing, or holds something else.
    """
    return read_json(path, _FILE)


def _require_coherent(behaviour: Behaviour) -> Behaviour:
    slots, usage = range(len(behaviour.sites)), behaviour.usage
    if not usage or any(one.operations.keys() != usage[0].operations.keys() for one in usage):
        raise ValueError("the use of operations is incomplete")
    if any(plant.slot not in slots for one in usage for plant in one.plants):
        raise ValueError("a seed lies in a slot that does not exist")
    for episode in behaviour.episodes:
        steps = range(len(episode.accuracy))
        if not steps or not (episode.drift_step is None or episode.drift_step in steps):
            raise ValueError("an episode's drift lies outside it")
        if any(
            change.slot not in slots or change.step not in steps or change.after not in _STAGES
            for change in episode.changes
        ):
            raise ValueError("an episode has an impossible change of stage")
    for earned in behaviour.earnings or ():
        kept = [seed.slot for seed in earned.seeds]
        if not set(kept) <= set(slots) or len(set(kept)) < len(kept):
            raise ValueError("an episode kept seeds that there cannot be")
        if any(pair.first >= pair.second or not {pair.first, pair.second} <= set(kept) for pair in earned.pairs):
            raise ValueError("an episode has an interaction of seeds that it did not keep")
    return behaviour


_STAGES = {stage.name.lower() for stage in Stage}
_FILE = TypeAdapter(Annotated[Behaviour, AfterValidator(_require_coherent)])


def _count_usage(family: str, split: Split, logs: Sequence[EpisodeLog]) -> Usage:
    operations = np.zeros(len(Op))
    germinated: Counter[tuple[int, str]] = Counter()
    kept: Counter[tuple[int, str]] = Counter()
    episodes = 0
    for log in logs:
        rows = {row for row, instance in enumerate(log.instances) if instance.family == family}
        episodes += len(rows)
        chosen = log.actions[:, sorted(rows), Head.OP]
        operations += np.bincount(chosen.ravel(), minlength=len(Op))
        for change in log.changes:
            if change.environment in rows and change.blueprint is not None:
                place = (change.slot, change.blueprint)
                germinated[place] += change.after == _GERMINATED
                kept[place] += change.after == _KEPT
    shares = operations / operations.sum()
    return Usage(
        family,
        split,
        episodes,
        {op.name.lower(): float(shares[op]) for op in Op},
        tuple(Plant(*place, germinated[place] / episodes, kept[place] / episodes) for place in sorted(germinated)),
    )


def _find_first_episode(family: str, split: Split, played: EvaluationResult) -> EpisodeTimeline:
    """The first episode of a family, of which there is one."""
    records = iter(played.records)
    for log in played.logs:
        for row, instance in enumerate(log.instances):
            record = next(records)
            if instance.family == family:
                return _describe_episode(row, split, log, record)
    raise ValueError(f"no episode of family {family} was played")


def _describe_episode(row: int, split: Split, log: EpisodeLog, record: Result) -> EpisodeTimeline:
    instance = log.instances[row]
    accuracies = log.accuracies[np.stack(log.running)[:, row], row]
    drift = instance.drift_step
    return EpisodeTimeline(
        instance.name,
        instance.family,
        instance.variant,
        split,
        record.score,
        record.added_parameters / record.host_parameters,
        drift if drift is not None and drift < len(accuracies) else None,
        tuple(accuracies.tolist()),
        tuple(change for change in log.changes if change.environment == row),
    )


FEWEST_EPISODES = 8
"""For an interval: fewer values say little of how much they vary."""


@dataclass(frozen=True)
class BlueprintShapley:
    """The kept seeds of one blueprint."""

    blueprint: str
    kept: int
    """Seeds."""
    episodes: int
    """Episodes in which at least one was kept."""
    value: float
    """Mean Shapley value of a seed, in accuracy, over those episodes."""
    interval: Interval | None
    """Of the mean; None for fewer than `FEWEST_EPISODES`."""
    negative: float
    """Share of the seeds with a value below 0."""


@dataclass(frozen=True)
class PairInteraction:
    """The episodes that kept seeds in both of two slots."""

    first: int
    second: int
    episodes: int
    interaction: float
    """Mean over those episodes, in accuracy."""
    interval: Interval | None
    """Of the mean; None for fewer than `FEWEST_EPISODES`."""


def summarise_blueprints(shapley: Sequence[SeedShapley]) -> list[BlueprintShapley]:
    """Summarise the kept seeds by blueprint, those kept most often first."""
    episodes: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for one in shapley:
        for blueprint in {seed.blueprint for seed in one.seeds}:
            values = [seed.value for seed in one.seeds if seed.blueprint == blueprint]
            episodes[blueprint].append((one.family, values))
    summed: list[BlueprintShapley] = []
    for blueprint, own in episodes.items():
        seeds = np.concatenate([values for _, values in own])
        # Episode by episode: the seeds of one network are not independent.
        mean, interval = _average([(family, float(np.mean(values))) for family, values in own])
        negative = float((seeds < 0).mean())
        summed.append(BlueprintShapley(blueprint, len(seeds), len(own), mean, interval, negative))
    return sorted(summed, key=lambda one: (-one.kept, one.blueprint))


def summarise_pairs(shapley: Sequence[SeedShapley]) -> list[PairInteraction]:
    """Summarise the interactions by pair of slots, in order."""
    interactions: dict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
    for one in shapley:
        for pair in one.pairs:
            interactions[pair.first, pair.second].append((one.family, pair.interaction))
    return [PairInteraction(*slots, len(own), *_average(own)) for slots, own in sorted(interactions.items())]


def _average(episodes: Sequence[tuple[str, float]]) -> tuple[float, Interval | None]:
    """The mean over episodes, each with its family, and where it lies."""
    families, values = zip(*episodes, strict=True)
    if len(values) < FEWEST_EPISODES:
        return float(np.mean(values)), None
    interval = mean_interval(np.array([values]), families)
    return interval.estimate, interval
