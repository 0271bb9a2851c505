"""The contents of each page of the dashboard, read from runs as plain JSON values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean as mean
from typing import Any, cast

from esper.dash.run_view import (
    Episode,
    Events,
    Fields,
    describe_ending,
    describe_seeds,
    plain,
    read_networks,
    read_payload,
)
from esper.errors import EsperError, RunError, plural
from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, Blend, Curve
from esper.rl.ppo import FIGURES
from esper.runs.events import (
    AnomalyRaised,
    EpisodeEnded,
    EpisodeStarted,
    GateChecked,
    InteractionsMeasured,
    LifecycleTransition,
    PolicyLooked,
    PolicyProbed,
    RolledBack,
    RunFailed,
    RunInterrupted,
    StepTaken,
)
from esper.runs.reader import SCORE, EventRecord, RunMetric, RunReader, describe_contributions
from esper.runs.run_directory import RunDirectory, is_grower, progress_metric, read_progress
from esper.train.iteration import LEVELS, UPDATE
from esper.train.results import read_verdicts

PAGE = 100
"""Most events in one response."""
LATE_PARTS = 3
"""A run's level is that of the last of this many equal parts."""
STEP_FIELDS = ("step", "op", "slot", "metric", "objective", "stages", "blueprints", "alphas", "contributions")
_STARTED_FIELDS = ("instance", "family", "variant")
_GROWN_FIGURES = ("train_loss", "validation_loss", "added_parameters")
"""Scalars of a run of a `Grower`, beside those of its metric."""
_NOT_DRAWN = ("ppo/head_share/", "ppo/head_entropy_weight/", "ppo/head_clip_fraction/", "kept/")
"""Prefixes of scalars that the learning page leaves out."""
_OF_RUN = ("suite", "host", "controller", "seed", "environments")
_OF_NETWORK = ("slots", "blueprints", "operations", "features", "environments", "steps")
_OF_MODEL = ("host", "controller", "seed", "slots", "blueprints", "host_parameters", "iterations")
_PROBED = ("instance", "family", "metric", "modules", "pairs", "exact")
_IN_POPULATION = (StepTaken.name, EpisodeStarted.name, EpisodeEnded.name, RolledBack.name)
_IN_NETWORK = (*_IN_POPULATION, LifecycleTransition.name, GateChecked.name)


_IMPORTANT = f"""(
    +type IN ('{RolledBack.name}', '{AnomalyRaised.name}', '{RunFailed.name}', '{RunInterrupted.name}')
    OR +type = '{LifecycleTransition.name}' AND CASE WHEN json_valid(payload)
        THEN json_extract(payload, '$.after') IN ('germinated', 'fossilized', 'pruned') END
)"""
"""SQL that is true for the events that the log shows by default."""


def describe_run(name: str, store: Path) -> dict[str, Any]:
    """A run with its settings and progress, or with the `error` that kept it from being read."""
    try:
        with RunReader.open(store) as reader:
            progress, metadata = read_progress(RunDirectory(store.parent), reader), reader.metadata()
    except EsperError as error:
        return {"name": name, "error": str(error)}
    return {
        "name": name,
        "command": progress.command,
        "state": str(progress.state),
        "done": progress.done,
        "total": progress.total,
        "started": progress.started,
        "probe": plain(progress.probe_score),
        "metric": progress.metric.metric,
        "value": plain(progress.value),
        **_pick(metadata, _OF_RUN),
    }


def _pick(metadata: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: plain(metadata.get(key)) for key in keys}


def describe_population(reader: RunReader, number: int | None) -> dict[str, Any]:
    """The networks of an episode, by default the newest: the problem and the steps of each."""
    cursor, metadata = reader.last_id(), reader.metadata()
    episode = Episode.find(reader, metadata, number)
    cards: list[dict[str, Any]] = []
    for environment, network in read_networks(reader, metadata, episode, _IN_POPULATION).items():
        started, ended = _first(network, EpisodeStarted.name), _first(network, EpisodeEnded.name)
        if started or network[StepTaken.name]:
            cards.append(
                {
                    "environment": environment,
                    **{name: (started or {}).get(name) for name in _STARTED_FIELDS},
                    "steps": [{name: step.get(name) for name in STEP_FIELDS} for step in network[StepTaken.name]],
                    "objective": (ended or {}).get("objective"),
                    "rollbacks": len(network[RolledBack.name]),
                }
            )
    return {
        "cursor": cursor,
        "slots": plain(metadata.get("slots", [])),
        **_pick(metadata, ("environments", "steps")),
        "episode": episode and episode._asdict(),
        "networks": cards,
    }


def _first(network: Events, event_type: str) -> Fields | None:
    return next(iter(network[event_type]), None)


def describe_network(reader: RunReader, number: int | None, environment: int) -> dict[str, Any]:
    """Everything about a network in an episode, by default the newest."""
    cursor, metadata = reader.last_id(), reader.metadata()
    header = {"cursor": cursor, "environment": environment, **_pick(metadata, _OF_NETWORK), "episode": None}
    episode = Episode.find(reader, metadata, number)
    if episode is None:
        return header
    network = read_networks(reader, metadata, episode, (*_IN_NETWORK, PolicyLooked.name), environment)[environment]
    return {
        **header,
        "episode": episode._asdict(),
        "started": _first(network, EpisodeStarted.name),
        "ended": _first(network, EpisodeEnded.name),
        "decisions": network[StepTaken.name],
        "seeds": describe_seeds(network),
        "gates": network[GateChecked.name],
        "rollbacks": network[RolledBack.name],
        "looks": [look.get("step") for look in network[PolicyLooked.name]],
    }


def describe_look(reader: RunReader, number: int, environment: int, step: int) -> dict[str, Any]:
    """The policy's observation and choices before a decision of a network; `look` is None if not recorded."""
    metadata = reader.metadata()
    episode = Episode.find(reader, metadata, number)
    looks = read_networks(reader, metadata, episode, (PolicyLooked.name,), environment)[environment]
    return {
        "look": next((look for look in looks[PolicyLooked.name] if look.get("step") == step), None),
        "features": plain(metadata.get("features")),
        "choices": {
            "op": plain(metadata.get("operations")),
            "slot": plain(metadata.get("slots")),
            "blueprint": plain(metadata.get("blueprints")),
            "blend": [blend.name.lower() for blend in Blend],
            "tempo": [plural(tempo, "step") for tempo in TEMPOS],
            "alpha_target": [str(target) for target in ALPHA_TARGETS],
            "alpha_speed": [plural(speed, "step") for speed in ALPHA_SPEEDS],
            "alpha_curve": [curve.name.lower() for curve in Curve],
        },
    }


def describe_interactions(reader: RunReader, number: int | None) -> dict[str, Any]:
    """The worth of kept modules, alone and in pairs, in the last probe up to an episode, by default the newest."""
    cursor, metadata = reader.last_id(), reader.metadata()
    episode = Episode.find(reader, metadata, number)
    rows = reader.rows(
        # GROUP BY: without it there would be a row of NULLs if there are no events.
        "SELECT max(iteration) AS iteration FROM events WHERE type = ? AND iteration <= ? GROUP BY NULL",
        PolicyProbed.name,
        0 if episode is None else episode.number,
    )
    iteration = rows[0][0] if rows else None
    records = [] if iteration is None else reader.records_within(iteration, iteration, (InteractionsMeasured.name,))
    networks = [cast("InteractionsMeasured", reader.decode(record)) for record in records]
    slots = metadata.get("slots", [])
    for network in networks:
        occupied = [module.slot for module in network.modules]
        if len(set(occupied)) < len(occupied) or not set(occupied) <= set(range(len(slots))):
            raise RunError(
                f"the run store {reader.path} is damaged: a network has modules in slots {occupied[:9]} of {len(slots)}"
            )
    return {
        "cursor": cursor,
        "slots": plain(slots),
        "iteration": iteration,
        "networks": [
            plain({name: value for name, value in asdict(network).items() if name in _PROBED}) for network in networks
        ],
    }


def describe_model(reader: RunReader) -> dict[str, Any]:
    """A run of a `Grower`: its model, decisions, seeds' lives, and its figures by decision, from 1."""
    cursor, metadata = reader.last_id(), reader.metadata()
    metric = RunMetric.from_metadata(metadata)
    series = {
        **{name: name for name in _GROWN_FIGURES},
        "metric": metric.scalar,
        "train_metric": metric.train_scalar,
        "score": SCORE,
    }
    grown = {"command": "grow"}
    network = read_networks(reader, grown, Episode.find(reader, grown), _IN_NETWORK, 0)[0]
    return {
        "cursor": cursor,
        **_pick(metadata, _OF_MODEL),
        "about": {
            **plain(asdict(metric)),
            "direction": metric.direction,
            "contribution": describe_contributions(metadata),
        },
        "decisions": network[StepTaken.name],
        "ending": describe_ending(network),
        "transitions": network[LifecycleTransition.name],
        "seeds": describe_seeds(network),
        "gates": network[GateChecked.name],
        "rollbacks": network[RolledBack.name],
        "figures": {
            name: dict(plain([list(point) for point in reader.series(scalar)])) for name, scalar in series.items()
        },
    }


def describe_learning(reader: RunReader) -> dict[str, Any]:
    """All scalars by iteration, the baselines' levels on the probe instances, anomalies, and what figures mean."""
    cursor, metadata = reader.last_id(), reader.metadata()
    figures: dict[str, dict[int, float | None]] = {}
    iterations: set[int] = set()
    for iteration, name, value in reader.rows("SELECT iteration, name, value FROM scalars"):
        if not str(name).startswith(_NOT_DRAWN):
            figures.setdefault(str(name), {})[iteration] = plain(value)
            iterations.add(iteration)
    # Every scalar as a list over the same iterations, with None where it has no value.
    ordered = sorted(iterations)
    anomalies = reader.rows("SELECT payload FROM events WHERE type = ? ORDER BY id", AnomalyRaised.name)
    return {
        "cursor": cursor,
        "total": plain(metadata.get("iterations")),
        "baselines": plain(metadata.get(LEVELS, {})),
        "iterations": ordered,
        "series": {name: [values.get(iteration) for iteration in ordered] for name, values in sorted(figures.items())},
        "anomalies": [read_payload(text) for (text,) in anomalies],
        "meanings": {f"{UPDATE}{name}": meaning for name, meaning in FIGURES.items()},
    }


def describe_compared(name: str, store: Path | None) -> dict[str, Any]:
    """A run's curve, late level, last probe and results of `esper evaluate`, or its `error`."""
    if store is None:
        return {"name": name, "error": "there is no run of this name any more"}
    try:
        with RunReader.open(store) as reader:
            metadata = reader.metadata()
            metric, scalar = progress_metric(metadata)
            series, probes = (
                [(iteration, value) for iteration, value in reader.series(series_name) if math.isfinite(value)]
                for series_name in (scalar, "probe_score")
            )
            return {
                "name": name,
                "cursor": reader.last_id(),
                "metric": metric.metric,
                "direction": metric.direction,
                "alone": is_grower(metadata),
                "iterations": [iteration for iteration, _ in series],
                "values": [value for _, value in series],
                "late": late_level([value for _, value in series]),
                "probe": {"iteration": probes[-1][0], "score": probes[-1][1]} if probes else None,
                "baselines": plain(metadata.get(LEVELS, {})),
                **_describe_evaluation(RunDirectory(store.parent)),
            }
    except EsperError as error:
        return {"name": name, "error": str(error)}


def late_level(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, lowest and highest of the last third of ``values``; None if there are none.

    There is no interval: iterations of one run depend on each other.
    """
    if not values:
        return None
    late = values[-math.ceil(len(values) / LATE_PARTS) :]
    return plain({"mean": mean(late), "count": len(late), "low": min(late), "high": max(late)})


def _describe_evaluation(run: RunDirectory) -> dict[str, Any]:
    """The record that `esper evaluate --json` prints, by split, or a note why it cannot be read."""
    if not run.evaluation.exists():
        return {"evaluation": {}, "evaluation_note": None}
    try:
        verdicts = read_verdicts(run.verdicts)
    except RunError as error:
        return {"evaluation": {}, "evaluation_note": str(error)}
    return {"evaluation": {split: asdict(record) for split, record in verdicts.items()}, "evaluation_note": None}


def list_events(
    reader: RunReader, types: Sequence[str], text: str, before: int | None, important: bool = False
) -> dict[str, Any]:
    """The newest events of these ``types``, if any, that contain ``text`` and have ids below ``before``.

    ``important``: only seeds that germinated, were kept or pruned, rollbacks, anomalies and failures.
    """
    conditions, parameters = ["1"], list[int | str]()
    if important:
        conditions.append(_IMPORTANT)
    if types:
        # `+` keeps SQLite from the index of types: walking back along the ids finds a page sooner.
        conditions.append(f"+type IN ({', '.join('?' for _ in types)})")
        parameters += types
    if text:
        conditions.append("instr(lower(type || ' ' || payload), lower(?))")
        parameters.append(text)
    if before is not None:
        conditions.append("id < ?")
        parameters.append(before)
    cursor = reader.last_id()
    rows = reader.rows(
        "SELECT id, time, type, version, iteration, payload FROM events "
        f"WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT {PAGE + 1}",
        *parameters,
    )
    counts = reader.rows("SELECT type, count(*) FROM events GROUP BY type ORDER BY type")
    return {
        "cursor": cursor,
        "slots": plain(reader.metadata().get("slots", [])),
        "types": [{"type": name, "count": count} for name, count in counts],
        "events": [describe_event(EventRecord(*row)) for row in rows[:PAGE]],
        "more": len(rows) > PAGE,
    }


def describe_event(record: EventRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "time": plain(record.time),
        "type": record.type,
        "iteration": record.iteration,
        "payload": read_payload(record.payload),
    }
