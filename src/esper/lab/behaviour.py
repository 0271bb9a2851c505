"""The behaviour of a controller in an evaluation: its operations, the values of kept seeds, a few complete episodes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, ConfigDict, TypeAdapter

from esper.files import write_atomically
from esper.lab.analysis import mean_interval
from esper.lab.figures.exhibit import Row, read_numbers
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.stages import Stage
from esper.tasks.suite import Split, Suite
from esper.train.episode_log import EpisodeLog, StageChange
from esper.train.evaluation import EvaluationResult
from esper.train.results import SeedShapley, read_json

_STAGES = {stage.name.lower() for stage in Stage}
_GERMINATED, _KEPT = Stage.GERMINATED.name.lower(), Stage.FOSSILIZED.name.lower()
FEWEST_EPISODES = 8
"""Smallest number of episodes for an interval; fewer values do not show how much they vary."""


@dataclass(frozen=True)
class Plant:
    """How often a blueprint was used in a slot, per episode."""

    slot: int
    blueprint: str
    germinated: float
    kept: float


@dataclass(frozen=True)
class Usage:
    """The behaviour of a controller on one family."""

    family: str
    split: Split
    episodes: int
    operations: dict[str, float]
    """Fraction of decisions for each operation."""
    plants: tuple[Plant, ...]
    """Combinations of slot and blueprint that were used."""


@dataclass(frozen=True)
class EpisodeTimeline:
    """The episode of one network: validation accuracy after each decision, and stage changes of its slots."""

    instance: str
    family: str
    variant: str
    split: Split
    score: float
    growth: float
    """Number of committed parameters divided by the host's."""
    drift_step: int | None
    accuracy: tuple[float, ...]
    changes: tuple[StageChange, ...]


@dataclass(frozen=True)
class Behaviour:
    """The behaviour of a run's policy in its evaluation."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)  # older files have more fields

    iteration: int
    """Number of training iterations of the policy."""
    sites: tuple[str, ...]
    blueprints: tuple[str, ...]
    usage: tuple[Usage, ...]
    episodes: tuple[EpisodeTimeline, ...]
    """The first episode of each family."""
    earnings: tuple[SeedShapley, ...] | None = None
    """Shapley values of the seeds kept in each episode; None in older files, which lack them."""


def describe_behaviour(suite: Suite, iteration: int, played: Mapping[Split, EvaluationResult]) -> Behaviour:
    """Summarise a policy's episodes on the instances of each split."""
    usage: list[Usage] = []
    episodes: list[EpisodeTimeline] = []
    for split, result in played.items():
        for family in sorted({record.family for record in result.records}):
            usage.append(_count_usage(family, split, result.logs))
            episodes.append(_describe_first_episode(family, split, result))
    earnings = tuple(values for result in played.values() for values in result.earnings)
    return Behaviour(iteration, suite.slot_names, suite.blueprints, tuple(usage), tuple(episodes), earnings)


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
    plants = [Plant(*place, germinated[place] / episodes, kept[place] / episodes) for place in sorted(germinated)]
    return Usage(family, split, episodes, {op.name.lower(): float(shares[op]) for op in Op}, tuple(plants))


def _describe_first_episode(family: str, split: Split, played: EvaluationResult) -> EpisodeTimeline:
    """The first episode of a family, which must have at least one."""
    # Records are in the order of the cohorts' logs.
    places = [(log, row) for log in played.logs for row in range(len(log.instances))]
    (log, row), record = next(
        (place, record) for place, record in zip(places, played.records, strict=True) if record.family == family
    )
    instance = log.instances[row]
    accuracies = log.accuracies[np.stack(log.running)[:, row], row]
    drift = instance.drift_step
    return EpisodeTimeline(
        instance=instance.name,
        family=instance.family,
        variant=instance.variant,
        split=split,
        score=record.score,
        growth=record.growth,
        drift_step=drift if drift is not None and drift < len(accuracies) else None,
        accuracy=tuple(accuracies.tolist()),
        changes=tuple(change for change in log.changes if change.environment == row),
    )


# On disk --------------------------------------------------------------------------------------------------------------


def write_behaviour(path: Path, behaviour: Behaviour) -> None:
    """Write the behaviour as JSON; raises RunError if that fails."""
    write_atomically(path, json.dumps(asdict(behaviour), indent=1))


def read_behaviour(path: Path) -> Behaviour:
    """Read a file written by `write_behaviour`."""
    return read_json(path, _FILE)


def _require_coherent(behaviour: Behaviour) -> Behaviour:
    """Reject files that a report could not show."""
    slots, usage = range(len(behaviour.sites)), behaviour.usage
    if not usage or any(entry.operations.keys() != usage[0].operations.keys() for entry in usage):
        raise ValueError("the use of operations is incomplete")
    if any(plant.slot not in slots for entry in usage for plant in entry.plants):
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
    for values in behaviour.earnings or ():
        kept = [seed.slot for seed in values.seeds]
        if not set(kept) <= set(slots) or len(set(kept)) < len(kept):
            raise ValueError("an episode kept seeds that there cannot be")
        if any(pair.first >= pair.second or not {pair.first, pair.second} <= set(kept) for pair in values.pairs):
            raise ValueError("an episode has an interaction of seeds that it did not keep")
    return behaviour


_FILE = TypeAdapter(Annotated[Behaviour, AfterValidator(_require_coherent)])


# What kept seeds earned -----------------------------------------------------------------------------------------------


def summarise_blueprints(shapley: Sequence[SeedShapley]) -> list[Row]:
    """A row per blueprint, the most often kept first: number of kept seeds, fraction of episodes, and value.

    The value is the mean Shapley value of a seed over the episodes that kept one; ``negative`` is the fraction of seeds
    with a value below 0.
    """
    episodes: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for episode in shapley:
        for blueprint in {seed.blueprint for seed in episode.seeds}:
            values = [seed.value for seed in episode.seeds if seed.blueprint == blueprint]
            episodes[blueprint].append((episode.family, values))
    rows: list[Row] = []
    for blueprint, families in sorted(episodes.items()):
        seeds = np.concatenate([values for _, values in families])
        rows.append(
            {
                "blueprint": blueprint,
                "kept": len(seeds),
                "episodes": len(families) / len(shapley),
                # Average within each episode first, because the seeds of one network are not independent.
                **_average([(family, float(np.mean(values))) for family, values in families]),
                "negative": float((seeds < 0).mean()),
            }
        )
    return sorted(rows, key=lambda row: -read_numbers([row], "kept")[0])


def summarise_pairs(shapley: Sequence[SeedShapley], sites: Sequence[str]) -> list[Row]:
    """A row per pair of slots, in order: number of episodes that kept seeds in both, and their mean interaction."""
    interactions: dict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
    for episode in shapley:
        for pair in episode.pairs:
            interactions[pair.first, pair.second].append((episode.family, pair.interaction))
    return [
        {"slots": f"{sites[first]}, {sites[second]}", "episodes": len(episodes), **_average(episodes)}
        for (first, second), episodes in sorted(interactions.items())
    ]


def _average(episodes: Sequence[tuple[str, float]]) -> Row:
    """The mean over episodes, each given with its family, and its interval if there are enough episodes."""
    families, values = zip(*episodes, strict=True)
    if len(values) < FEWEST_EPISODES:
        return {"value": float(np.mean(values)), "value_low": None, "value_high": None}
    interval = mean_interval(np.array([values]), families)
    return {"value": interval.estimate, "value_low": interval.low, "value_high": interval.high}
