"""The report of one model that grew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from esper.config.loading import MOST_BYTES
from esper.dash.formats import difference, measure, percent
from esper.errors import ConfigError, RunError, plural
from esper.files import read_bounded
from esper.lab.figures.exhibit import Exhibit, Row, Table, group_rows, read_numbers
from esper.lab.figures.grown import ADDED, compare_with_bare, grown_exhibits
from esper.lab.report.page import Headline, Report, Reproduction, Section, list_platforms
from esper.lifecycle.stages import Stage
from esper.runs.events import LifecycleTransition
from esper.runs.metric import ACCURACY, LOSS, Metric
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory, RunProgress, read_progress


def report_grown(run: RunDirectory, bare: RunDirectory | None = None) -> Report:
    """The report of a run of a `Grower`, also while it goes on.

    Args:
        run: The run.
        bare: A run of the same training loop with the same host in which nothing grew, to compare with.
    """
    with RunReader.open(run.store) as reader:
        metadata, progress, platforms = reader.metadata(), read_progress(run, reader), list_platforms(reader)
    try:
        settings = read_bounded(run.config, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunError(f"cannot read the configuration {run.config}: {error.strerror}") from error
    exhibits = grown_exhibits(run.store, metadata)
    by_name = {exhibit.name: exhibit for exhibit in exhibits}
    headlines: list[Headline] = []
    sections: list[Section] = []

    # The bare host first: whether growth paid is the reader's first question.
    if bare is not None:
        _require_comparable(run, metadata, bare)
        compared = compare_with_bare(run.store, metadata, bare.store)
        headlines = [_describe_comparison(metadata, bare, row) for row in compared[1].rows[:1]]
        sections = [Section("Compared with the bare host", compared)]
        exhibits += compared

    # Before the first decision there is nothing to draw; tables give their reason themselves.
    if any(row["measure"] == LOSS for row in by_name["curves"].rows):
        headlines.insert(0, _describe_state(metadata, progress, by_name))
        titles = {
            "snapshots": "The network as it grew",
            "curves": "How it learned",
            "stages": "Stages of each slot",
            "contributions": "Contributions of seeds",
        }
        sections += [
            Section(title, [by_name[name]])
            for name, title in titles.items()
            if name != "contributions" or by_name[name].rows
        ]
    else:
        headlines.insert(0, Headline("No decision yet", [f"The run is {progress.state}."]))
        sections += [Section("How it learned", note="There are no decisions yet.")]
    tables = [exhibit for exhibit in by_name.values() if isinstance(exhibit, Table)]
    # Runs without a horizon do not know how long they last.
    planned = metadata.get("iterations")
    plan = "" if planned is None else f", {plural(planned, 'decision')} planned"
    return Report(
        title=f"Esper: {run.path.name}",
        heading=f"How {metadata.get('host', 'a model')} grew",
        facts=f"Run {run.path}: controller {metadata.get('controller', '?')}, seed {metadata.get('seed', '?')}{plan}; "
        f"{platforms}.",
        headlines=headlines,
        sections=[*sections, *(Section(table.name.capitalize(), [table]) for table in tables)],
        exhibits=exhibits,
        reproduction=Reproduction("Settings of the grower", settings),
    )


def _require_comparable(run: RunDirectory, metadata: Mapping[str, Any], bare: RunDirectory) -> None:
    """Refuse a run that is not one of the same host without growth."""
    advice = 'give a run of the same training loop with `controller="none"`'
    with RunReader.open(bare.store) as reader:
        found = reader.metadata()
        (germinated,) = reader.rows(
            "SELECT count(*) FROM events WHERE type = ? AND json_extract(payload, '$.after') = 'germinated'",
            LifecycleTransition.name,
        )[0]
    if found.get("command") != "grow":
        raise ConfigError(f"{bare.path} is not a run of a `Grower`, so it has no bare host: {advice}")
    if germinated:
        raise ConfigError(f"{bare.path} is not bare, as {plural(germinated, 'seed')} germinated in it: {advice}")
    # A run names its metric once it has measured it.
    measured = ("metric", "higher_is_better") if "metric" in found and "metric" in metadata else ()
    for name in ("host", "host_parameters", *measured):
        if found.get(name) != metadata.get(name):
            raise ConfigError(
                f"{bare.path} cannot be compared with {run.path}: {name} is {found.get(name)!r} instead of "
                f"{metadata.get(name)!r}: {advice}"
            )


def _describe_comparison(metadata: Mapping[str, Any], bare: RunDirectory, row: Row) -> Headline:
    """The metric of the grown model and of the bare host after equal training."""
    metric = Metric.from_metadata(metadata)
    grown, host, change = (read_numbers([row], name)[0] for name in ("grown", "bare", "difference"))
    note = f"Bare host: {bare.path}. One run of each, so another random seed may change the difference."
    if not math.isfinite(change):
        sentence = f"After decision {row['decision']}, {metric.metric} on validation data is not finite in both runs."
        return Headline("No comparison with the bare host", [sentence], notes=[note])
    better = "no change" if change == 0 else "better" if (change > 0) == metric.higher_is_better else "worse"
    sentence = (
        f"On validation data after decision {row['decision']}: {difference(change)}, {better}"
        f"{f' ({metric.direction})' if metric.direction else ''}."
    )
    return Headline(f"{metric.metric} {measure(grown)} with growth, {measure(host)} without", [sentence], notes=[note])


def _describe_state(metadata: Mapping[str, Any], progress: RunProgress, exhibits: Mapping[str, Exhibit]) -> Headline:
    """What the model has come to after its newest decision."""
    curves = group_rows(exhibits["curves"].rows, "measure")
    rollbacks = len(curves.pop("rollback", []))
    newest: dict[str, float] = {}
    for name, rows in curves.items():
        # On validation data, where there is more than one kind of data.
        data = group_rows(rows, "data")
        newest[name] = read_numbers(data.get("validation") or next(iter(data.values())), "value")[-1]

    metric = Metric.from_metadata(metadata)
    value = newest.get(metric.metric, math.nan)
    if metric.metric == ACCURACY and math.isfinite(value):
        short = f"{percent(value)} accuracy"
    else:
        # Names of user-defined metrics stay as they are.
        name = metric.metric.capitalize() if metric.metric in (LOSS, ACCURACY) else metric.metric
        short = f"{name} {measure(value)}"

    # Seeds that are in the model now: after the last decision, and after what the end of growth made of them.
    stages = {slot: rows[-1]["stage"] for slot, rows in group_rows(exhibits["stages"].rows, "slot_name").items()}
    fossilized, pruned = Stage.FOSSILIZED.name.lower(), Stage.PRUNED.name.lower()
    residents: list[str] = []
    for slot, seeds in group_rows(exhibits["seeds"].rows, "slot_name").items():
        outcome = seeds[-1]["outcome"]
        if outcome != pruned:
            stage = "" if outcome == fossilized else f", {stages[slot]}"
            residents.append(f"{seeds[-1]['blueprint']} in {slot}{stage}")

    # The loss is not repeated where it is the metric.
    loss = "" if metric.is_loss else f"loss {measure(newest[LOSS])}; "
    host = metadata.get("host_parameters")
    parameters = f"{host:,}" if isinstance(host, int) else "?"
    sentence = (
        f"After {plural(progress.done, 'decision')} ({progress.state}): {loss}{parameters} parameters in the host and "
        f"{newest[ADDED]:,.0f} added by growth ({'; '.join(residents) or 'none'}); {plural(rollbacks, 'rollback')}."
    )
    return Headline(f"{short} on validation data", [sentence])
