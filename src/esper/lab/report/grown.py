"""The report of one model that grew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.config.loading import MOST_BYTES
from esper.dash.formats import measure, percent
from esper.errors import RunError
from esper.files import read_bounded
from esper.lab.figures.exhibit import Exhibit, Rows, Table
from esper.lab.figures.grown import ADDED, grown_exhibits
from esper.lab.report.page import Headline, Page, Report, Reproduction, Section
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
    exhibits = grown_exhibits(run.store, metadata)
    by_name = {one.what.name: one for one in exhibits}
    planned = metadata.get("iterations")
    page = Page(
        f"Esper: {run.path.name}",
        f"How {metadata.get('host', 'a model')} grew",
        f"Run {run.path}: controller {metadata.get('controller', '?')}, seed {metadata.get('seed', '?')}"
        f"{'' if planned is None else f', {planned} decisions planned'}.",
        [_describe_standing(metadata, progress, by_name)],
        [
            *_show_figures(by_name),
            *(Section(one.what.name.capitalize(), [one]) for one in exhibits if isinstance(one.what, Table)),
        ],
        Reproduction("What the grower was told", _read_config(run.config)),
    )
    return Report(page.html(), exhibits)


def _read_config(path: Path) -> str:
    try:
        return read_bounded(path, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunError(f"cannot read the configuration {path}: {error.strerror}") from error


def _describe_standing(metadata: Mapping[str, Any], progress: RunProgress, exhibits: Mapping[str, Exhibit]) -> Headline:
    """For a model whose training is its owner's."""
    curves = exhibits["curves"].rows.by("measure")
    if LOSS not in curves:
        return Headline("No decision yet", [f"The run is {progress.state}."])
    newest = {name: _last_value(part) for name, part in curves.items() if name != "rollback"}
    about = Metric.from_metadata(metadata)
    value = newest.get(about.metric, math.nan)
    if about.metric == ACCURACY and math.isfinite(value):
        short = f"{percent(value)} right"
    else:  # names that their owner gave stay as they are
        title = about.metric.capitalize() if about.metric in (LOSS, ACCURACY) else about.metric
        short = f"{title} {measure(value)}"
    loss = "" if about.is_loss else f"loss {measure(newest[LOSS])}; "
    host = metadata.get("host_parameters")
    parameters = f"{host:,}" if isinstance(host, int) else "?"
    rollbacks = len(curves["rollback"]) if "rollback" in curves else 0
    sentence = (
        f"After {progress.done} decisions ({progress.state}): {loss}{parameters} parameters and {newest[ADDED]:,.0f} "
        f"of what grew ({_list_residents(exhibits)}); {rollbacks} rollback{'' if rollbacks == 1 else 's'}."
    )
    return Headline(f"{short} on validation data", [sentence])


def _last_value(rows: Rows) -> float:
    """The last value on validation data, or of what has one kind of data only."""
    parts = rows.by("data")
    return (parts.get("validation") or next(iter(parts.values()))).numbers("value")[-1]


def _list_residents(exhibits: Mapping[str, Exhibit]) -> str:
    """Seeds that are in the model now: after the last decision, and after what the end of growth made of them."""
    stages = {slot: part.texts("stage")[-1] for slot, part in exhibits["stages"].rows.by("slot_name").items()}
    fossilized, pruned = Stage.FOSSILIZED.name.lower(), Stage.PRUNED.name.lower()
    sentences: list[str] = []
    for slot, lives in exhibits["seeds"].rows.by("slot_name").items():
        outcome, blueprint = lives.texts("outcome")[-1], lives.texts("blueprint")[-1]
        if outcome != pruned:
            sentences.append(f"{blueprint} in {slot}{'' if outcome == fossilized else f', {stages[slot]}'}")
    return "; ".join(sentences) or "nothing"


def _show_figures(exhibits: Mapping[str, Exhibit]) -> list[Section]:
    if LOSS not in exhibits["curves"].rows.by("measure"):
        return [Section("How it learned", note="No decision was made yet.")]
    contributions = exhibits["contributions"]
    return [
        Section("The network as it grew", [exhibits["snapshots"]]),
        Section("How it learned", [exhibits["curves"]]),
        Section("What its slots went through", [exhibits["stages"]]),
        *([Section("What its seeds contribute", [contributions])] if contributions.rows else []),
    ]
