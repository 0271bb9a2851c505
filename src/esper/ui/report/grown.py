"""The page of one model that grew."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.errors import RunError
from esper.experiments.episode_log import StageChange
from esper.files import read_bounded
from esper.lifecycle.stages import Stage
from esper.parsing import MOST_BYTES
from esper.practice.result import GrowResult, read_result
from esper.practice.run import GrowDirectory
from esper.telemetry.metric import ACCURACY, LOSS, Metric
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import GROWER, RunProgress, maker_of, read_progress
from esper.ui.figures.exhibits import grown_exhibits, own_exhibits
from esper.ui.figures.grown import CHANGES, CONTRIBUTIONS, CURVES
from esper.ui.figures.record import Exhibit, Figure, Table
from esper.ui.figures.rows import Rows, fetch
from esper.ui.formats import duration, percent, score
from esper.ui.formats import figure as figure_of
from esper.ui.report.axes import axis_for, counting_axis
from esper.ui.report.document import document
from esper.ui.report.episodes import lanes, stage_legend
from esper.ui.report.layout import exhibited, figure, legend, section
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, vertical

HEIGHT = 200
HUES = 7
"""Colours of the style sheet that curves use; they come round again."""
_KINDS = {"train": "objective", "validation": "policy", "seeds": "policy"}
"""Classes of the curves, by the data that they are measured on."""


@dataclass(frozen=True)
class GrownData:
    """A run of `esper grow` or of a `Grower` as its page needs it."""

    run: str
    metadata: Mapping[str, Any]
    """What the run says of itself."""
    config: str
    """Its ``config.yaml``."""
    progress: RunProgress
    slots: list[str]
    changes: Rows
    """What `CHANGES` gives."""
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
    (changes,) = fetch(run.store, [CHANGES.text])
    slots: list[str] = metadata.get("slots", [])
    exhibits = (
        own_exhibits(run.store, metadata)
        if maker_of(metadata) == GROWER
        else grown_exhibits(run.store, metadata, result)
    )
    return GrownData(str(run.path), metadata, _config(run.config), progress, slots, changes, result, exhibits)


def _config(path: Path) -> str:
    try:
        return read_bounded(path, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunError(f"cannot read the configuration {path}: {error.strerror}") from error


def grown_html(data: GrownData) -> str:
    """The whole page."""
    host, task = data.metadata.get("host", "a model"), data.metadata.get("task")
    parts = [
        element("h1", f"How {host} grew" if task is None else f"How {host} grew on {task}"),
        element("p", _facts(data), class_="facts"),
        _answer(data),
        *_figures(data),
        *(section(what.name.capitalize(), exhibited(what, rows)) for what, rows in _tables(data.exhibits)),
        _settings(data),
    ]
    return document(f"Esper: {Path(data.run).name}", *parts)


def _changes(rows: Rows) -> list[StageChange]:
    """The one network's, in order."""
    steps, slots, blueprints = rows.numbers("step"), rows.numbers("slot"), rows.column("blueprint")
    told = zip(*(rows.texts(name) for name in ("before", "after", "cause", "reason")), strict=True)
    return [
        StageChange(0, int(step), int(slot), before, after, blueprint if isinstance(blueprint, str) else None, *why)
        for step, slot, blueprint, (before, after, *why) in zip(steps, slots, blueprints, told, strict=True)
    ]


def _tables(exhibits: Sequence[Exhibit]) -> list[tuple[Table, Rows]]:
    return [(what, rows) for what, rows in exhibits if isinstance(what, Table)]


def _facts(data: GrownData) -> str:
    told = data.metadata
    planned = told.get("iterations")
    what = "" if planned is None else f", {planned} decisions planned" if data.own else f", {planned} epochs"
    return f"Run {data.run}: controller {told.get('controller', '?')}, seed {told.get('seed', '?')}{what}."


def _answer(data: GrownData) -> Element:
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
    return element("div", element("strong", short), element("p", long), class_="answer")


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
        f"and {newest[_ADDED]:,.0f} of what grew ({_residents(data)}); "
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
    """Seeds that are in the model after the last decision."""
    lanes = [(slot, part) for slot, part in data.rows("stages").by("slot_name").items()]
    last = [(slot, part.texts("stage")[-1], part.column("blueprint")[-1]) for slot, part in lanes]
    fossilized = Stage.FOSSILIZED.name.lower()
    told = [
        f"{blueprint} in {slot}{'' if stage == fossilized else f', {stage}'}"
        for slot, stage, blueprint in last
        if blueprint is not None
    ]
    return "; ".join(told) or "nothing"


def _figures(data: GrownData) -> list[Element]:
    what, rows = data.exhibit("curves")
    curves = rows.by("measure")
    if "loss" not in curves:
        return [section("How it learned", element("p", "No decision was made yet.", class_="note"))]
    decisions = round(max(curves["loss"].numbers("decision")))
    rollbacks = curves["rollback"].numbers("decision") if "rollback" in curves else []
    titles = {name: title for name, title in _titles(data).items() if name in curves}
    drawn = [_curves(curves[name], decisions, rollbacks, title, name == _ADDED) for name, title in titles.items()]
    learned = figure(element("div", *drawn, class_="gauges"), what.caption, _SAMPLES, source=CURVES)
    parts = [section("How it learned", learned), _stages(data, decisions)]
    return [*parts, *_contributions(*data.exhibit("contributions"), decisions)]


def _titles(data: GrownData) -> dict[str, str]:
    """Of the curves, by measure: what growth is about comes first."""
    about = Metric.of(data.metadata)
    direction = f" ({about.direction})" if about.direction else ""
    titles = {about.metric: f"{_title(about)}{direction}", LOSS: "Loss", _ADDED: "Parameters of all seeds"}
    return {measure: f"{title} by decision" for measure, title in titles.items()}


_ADDED = "added_parameters"
_SAMPLES = legend([("training data", "swatch objective"), ("validation data, seeds", "swatch policy")])


def _curves(rows: Rows, decisions: int, rollbacks: Sequence[float], title: str, from_zero: bool) -> Element:
    values = [*([0.0] if from_zero else []), *rows.numbers("value")]
    plot = Plot(counting_axis(decisions), axis_for(values), HEIGHT)
    marks: list[Node] = [vertical(plot.across(decision), 0, plot.height, "baseline") for decision in rollbacks]
    for name, part in rows.by("data").items():
        points = list(zip(part.numbers("decision"), part.numbers("value"), strict=True))
        marks.append(plot.curve(points, _KINDS[name]))
    drawn = plot.figure(*marks, title=title, x_title="decision")
    return element("div", element("h4", title), drawn)


def _stages(data: GrownData, decisions: int) -> Element:
    caption = "One lane per slot over the decisions; a label names the blueprint that germinated there."
    drawn = lanes(_changes(data.changes), decisions, data.slots)
    return section("What its slots went through", figure(drawn, caption, stage_legend(), source=CHANGES))


def _contributions(what: Figure | Table, rows: Rows, decisions: int) -> list[Element]:
    if not rows:
        return []
    plot = Plot(counting_axis(decisions), axis_for([0.0, *rows.numbers("contribution")]), HEIGHT)
    marks: list[Node] = [plot.level(0, "zero")]
    parts = rows.by("slot_name")
    for index, part in enumerate(parts.values()):
        points = list(zip(part.numbers("decision"), part.numbers("contribution"), strict=True))
        marks.append(plot.curve(points, f"hue hue{index % HUES}"))
    drawn = plot.figure(*marks, title="Contribution of each slot's seed by decision", x_title="decision")
    entries = [(slot, f"swatch hue hue{index % HUES}") for index, slot in enumerate(parts)]
    return [section("What its seeds contribute", figure(drawn, what.caption, legend(entries), source=CONTRIBUTIONS))]


def _settings(data: GrownData) -> Element:
    """How to do it again, as far as Esper knows."""
    if data.own:
        told = element("details", element("summary", "All settings"), element("pre", data.config))
        return section("What the grower was told", told)
    command = f"esper grow --config {shlex.quote(f'{data.run}/config.yaml')} --run-dir runs/again"
    return section(
        "How to reproduce this",
        element("pre", element("code", command)),
        element("details", element("summary", "All settings"), element("pre", data.config)),
    )
