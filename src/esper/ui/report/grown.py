"""The page of one model that grew."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.errors import RunError
from esper.files import read_bounded
from esper.lifecycle.stages import Stage
from esper.parsing import MOST_BYTES
from esper.practice.result import GrowResult, read_result
from esper.practice.run import GrowDirectory
from esper.telemetry.metric import ACCURACY, LOSS, Metric
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import GROWER, RunProgress, maker_of, read_progress
from esper.ui.figures.exhibits import grown_exhibits, own_exhibits
from esper.ui.figures.grown import ADDED
from esper.ui.figures.record import Exhibit, Table
from esper.ui.figures.rows import Rows
from esper.ui.formats import duration, percent, score
from esper.ui.formats import figure as figure_of
from esper.ui.report.page import Again, Answer, Page, Section


@dataclass(frozen=True)
class GrownData:
    """A run of `esper grow` or of a `Grower` as its page needs it."""

    run: str
    metadata: Mapping[str, Any]
    """What the run says of itself."""
    config: str
    """Its ``config.yaml``."""
    progress: RunProgress
    result: GrowResult | None
    """None before a run of `esper grow` has ended, and of a `Grower`, which tests nothing."""
    exhibits: list[Exhibit]

    @property
    def own(self) -> bool:
        """Whether a `Grower` wrote it in its owner's loop."""
        return maker_of(self.metadata) == GROWER

    def exhibit(self, name: str) -> Exhibit:
        """A figure and its numbers."""
        return next((what, rows) for what, rows in self.exhibits if what.name == name)

    def rows(self, name: str) -> Rows:
        """The numbers of a figure."""
        return self.exhibit(name)[1]


def load_grown(run: GrowDirectory) -> GrownData:
    """Read a run, also while it goes on.

    Raises:
        RunError: a file of the run is missing or damaged.
    """
    result = read_result(run.result) if run.result.exists() else None
    with RunReader.open(run.store) as reader:
        metadata, progress = reader.metadata(), read_progress(run, reader)
    exhibits = (
        own_exhibits(run.store, metadata)
        if maker_of(metadata) == GROWER
        else grown_exhibits(run.store, metadata, result)
    )
    return GrownData(str(run.path), metadata, _config(run.config), progress, result, exhibits)


def _config(path: Path) -> str:
    try:
        return read_bounded(path, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunError(f"cannot read the configuration {path}: {error.strerror}") from error


def grown_html(data: GrownData) -> str:
    """The whole page."""
    host, task = data.metadata.get("host", "a model"), data.metadata.get("task")
    tables = [one for one in data.exhibits if isinstance(one[0], Table)]
    return Page(
        f"Esper: {Path(data.run).name}",
        f"How {host} grew" if task is None else f"How {host} grew on {task}",
        _facts(data),
        [_answer(data)],
        [*_figures(data), *(Section(one[0].name.capitalize(), [one]) for one in tables)],
        _again(data),
    ).html()


def _facts(data: GrownData) -> str:
    told = data.metadata
    planned = told.get("iterations")
    what = "" if planned is None else f", {planned} decisions planned" if data.own else f", {planned} epochs"
    return f"Run {data.run}: controller {told.get('controller', '?')}, seed {told.get('seed', '?')}{what}."


def _answer(data: GrownData) -> Answer:
    result = data.result
    if data.own:
        short, long = _standing(data)
    elif result is None:
        short = "Not finished yet"
        long = f"Go on with esper grow --resume {shlex.quote(data.run)}, unless it is running."
    else:
        short = f"{percent(result.accuracy)} right on test data"
        kept = ", ".join(f"{one.blueprint} in {one.slot}" for one in result.kept) or "nothing"
        long = (
            f"Loss {figure_of(result.loss)}, {score(result.score)} of accuracy less rent; "
            f"{result.host_parameters:,} parameters and {result.added_parameters:,} that grew ({kept}); "
            f"{result.training_flops:.2g} training FLOPs in {duration(result.seconds)}, {result.rollbacks} rollbacks."
        )
    return Answer(short, [long])


def _standing(data: GrownData) -> tuple[str, str]:
    """How a model stands whose training is its owner's: in short, and at length."""
    curves = data.rows("curves").by("measure")
    if "loss" not in curves:
        return "No decision yet", f"The run is {data.progress.state}."
    newest = {name: _newest(part) for name, part in curves.items() if name != "rollback"}
    about = Metric.of(data.metadata)
    value = newest.get(about.metric, math.nan)
    told = f"{percent(value)} right" if about.metric == ACCURACY and math.isfinite(value) else _told(about, value)
    loss = "" if about.is_loss else f"loss {figure_of(newest[LOSS])}; "
    rollbacks = len(curves["rollback"]) if "rollback" in curves else 0
    return f"{told} on validation data", (
        f"After {data.progress.done} decisions ({data.progress.state}): {loss}{_parameters(data.metadata)} parameters "
        f"and {newest[ADDED]:,.0f} of what grew ({_residents(data)}); "
        f"{rollbacks} rollback{'' if rollbacks == 1 else 's'}."
    )


def _told(about: Metric, value: float) -> str:
    return f"{_title(about)} {figure_of(value)}"


def _title(about: Metric) -> str:
    """Names that their owner gave stay as they are."""
    return about.metric.capitalize() if about.metric in (LOSS, ACCURACY) else about.metric


def _newest(rows: Rows) -> float:
    """The last value on validation data, or of what has one kind of data only."""
    parts = rows.by("data")
    return (parts.get("validation") or next(iter(parts.values()))).numbers("value")[-1]


def _parameters(metadata: Mapping[str, Any]) -> str:
    host = metadata.get("host_parameters")
    return f"{host:,}" if isinstance(host, int) else "?"


def _residents(data: GrownData) -> str:
    """Seeds that are in the model now: after the last decision, and after what the end of growth made of them."""
    stages = {slot: part.texts("stage")[-1] for slot, part in data.rows("stages").by("slot_name").items()}
    fossilized, pruned = Stage.FOSSILIZED.name.lower(), Stage.PRUNED.name.lower()
    told: list[str] = []
    for slot, lives in data.rows("seeds").by("slot_name").items():
        outcome, blueprint = lives.texts("outcome")[-1], lives.texts("blueprint")[-1]
        if outcome != pruned:
            told.append(f"{blueprint} in {slot}{'' if outcome == fossilized else f', {stages[slot]}'}")
    return "; ".join(told) or "nothing"


def _figures(data: GrownData) -> list[Section]:
    if "loss" not in data.rows("curves").by("measure"):
        return [Section("How it learned", note="No decision was made yet.")]
    contributions = data.exhibit("contributions")
    return [
        Section("How it learned", [data.exhibit("curves")]),
        Section("What its slots went through", [data.exhibit("stages")]),
        *([Section("What its seeds contribute", [contributions])] if contributions[1] else []),
    ]


def _again(data: GrownData) -> Again:
    """How to do it again, as far as Esper knows."""
    if data.own:
        return Again("What the grower was told", data.config)
    command = f"esper grow --config {shlex.quote(f'{data.run}/config.yaml')} --run-dir runs/again"
    return Again("How to reproduce this", data.config, commands=command)
