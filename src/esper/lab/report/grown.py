"""The report of one model that grew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from esper.config.loading import MOST_BYTES
from esper.dash.formats import measure, percent
from esper.errors import RunError, plural
from esper.files import read_bounded
from esper.lab.figures.exhibit import Exhibit, Table, group_rows, read_numbers
from esper.lab.figures.grown import ADDED, grown_exhibits
from esper.lab.report.page import Headline, Report, Reproduction, Section
from esper.lifecycle.stages import Stage
from esper.runs.metric import ACCURACY, LOSS, Metric
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory, RunProgress, read_progress


def report_grown(run: RunDirectory) -> Report:
    """The report of a run of a `Grower`, also while it goes on.

    Raises:
        RunError: a file of the run is missing or damaged.
    """
    with RunReader.open(run.store) as reader:
        metadata, progress = reader.metadata(), read_progress(run, reader)
    try:
        settings = read_bounded(run.config, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunError(f"cannot read the configuration {run.config}: {error.strerror}") from error
    exhibits = grown_exhibits(run.store, metadata)
    by_name = {exhibit.name: exhibit for exhibit in exhibits}

    # Before the first decision there is nothing to draw; tables give their reason themselves.
    if any(row["measure"] == LOSS for row in by_name["curves"].rows):
        headline = _describe_state(metadata, progress, by_name)
        titles = {
            "snapshots": "The network as it grew",
            "curves": "How it learned",
            "stages": "What its slots went through",
            "contributions": "What its seeds contribute",
        }
        sections = [
            Section(title, [by_name[name]])
            for name, title in titles.items()
            if name != "contributions" or by_name[name].rows
        ]
    else:
        headline = Headline("No decision yet", [f"The run is {progress.state}."])
        sections = [Section("How it learned", note="No decision was made yet.")]
    tables = [exhibit for exhibit in exhibits if isinstance(exhibit, Table)]
    # Runs without a horizon do not know how long they last.
    planned = metadata.get("iterations")
    plan = "" if planned is None else f", {plural(planned, 'decision')} planned"
    return Report(
        title=f"Esper: {run.path.name}",
        heading=f"How {metadata.get('host', 'a model')} grew",
        facts=f"Run {run.path}: controller {metadata.get('controller', '?')}, seed {metadata.get('seed', '?')}{plan}.",
        headlines=[headline],
        sections=[*sections, *(Section(table.name.capitalize(), [table]) for table in tables)],
        exhibits=exhibits,
        reproduction=Reproduction("Settings of the grower", settings),
    )


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
        short = f"{percent(value)} right"
    else:
        # Names of the owner's own metrics stay as they are.
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
        f"After {plural(progress.done, 'decision')} ({progress.state}): {loss}{parameters} parameters and "
        f"{newest[ADDED]:,.0f} of what grew ({'; '.join(residents) or 'nothing'}); {plural(rollbacks, 'rollback')}."
    )
    return Headline(f"{short} on validation data", [sentence])
