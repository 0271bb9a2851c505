"""The page of one model that grew."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.config import load_settings, settings_text
from esper.experiments.tallies import StageChange
from esper.grower.practice.directory import GrowDirectory
from esper.grower.practice.result import Result, read_result
from esper.grower.practice.settings import GrowSettings
from esper.telemetry.reader import RunReader
from esper.ui.figures.exhibits import grown_exhibits
from esper.ui.figures.grown import CHANGES, CONTRIBUTIONS, CURVES
from esper.ui.figures.record import Exhibit, Table
from esper.ui.figures.rows import Rows, fetch
from esper.ui.formats import duration, percent, score
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
    """A run of `esper grow` as its page needs it."""

    run: str
    settings: GrowSettings
    slots: list[str]
    changes: Rows
    """What `CHANGES` gives."""
    result: Result | None
    """None before the run has ended."""
    exhibits: list[Exhibit]

    def rows(self, name: str) -> Rows:
        """The numbers of a figure."""
        return next(rows for what, rows in self.exhibits if what.name == name)


def load_grown(run: GrowDirectory) -> GrownData:
    """Read a run, also while it goes on.

    Raises:
        RunError, ConfigError: a file of the run is damaged.
    """
    result = read_result(run.result) if run.result.exists() else None
    with RunReader.open(run.store) as reader:
        slots: list[str] = reader.metadata().get("slots", [])
    (changes,) = fetch(run.store, [CHANGES.text])
    exhibits = grown_exhibits(run.store, result)
    return GrownData(str(run.path), load_settings(GrowSettings, run.config), slots, changes, result, exhibits)


def grown_html(data: GrownData) -> str:
    """The whole page."""
    settings = data.settings
    parts = [
        element("h1", f"How {settings.host} grew on {settings.task}"),
        element("p", _facts(data), class_="facts"),
        _answer(data),
        *_figures(data),
        *(section(what.name.capitalize(), exhibited(what, rows)) for what, rows in _tables(data.exhibits)),
        _reproduce(data),
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
    settings = data.settings
    return f"Run {data.run}: controller {settings.controller}, seed {settings.seed}, {settings.epochs} epochs."


def _answer(data: GrownData) -> Element:
    result = data.result
    if result is None:
        short = "Not finished yet"
        long = f"Go on with esper grow --resume {shlex.quote(data.run)}, unless it is running."
    else:
        short = f"{percent(result.accuracy)} right on test data"
        kept = ", ".join(f"{one.blueprint} in {one.slot}" for one in result.kept) or "nothing"
        long = (
            f"Loss {score(result.loss)}, score {score(result.score)}; {result.host_parameters:,} parameters and "
            f"{result.added_parameters:,} that grew ({kept}); {result.training_flops:.2g} training FLOPs in "
            f"{duration(result.seconds)}, {result.rollbacks} rollbacks."
        )
    return element("div", element("strong", short), element("p", long), class_="answer")


def _figures(data: GrownData) -> list[Element]:
    curves = data.rows("curves").by("measure")
    if "loss" not in curves:
        return [section("How it learned", element("p", "No epoch is done yet.", class_="note"))]
    epochs = round(max(curves["loss"].numbers("epoch")))
    rollbacks = curves["rollback"].numbers("epoch") if "rollback" in curves else []
    drawn = [_curves(curves[name], epochs, rollbacks, title) for name, title in _MEASURES.items() if name in curves]
    learned = figure(element("div", *drawn, class_="gauges"), _LEARNED, _SAMPLES, source=CURVES)
    parts = [section("How it learned", learned), _stages(data, epochs)]
    return [*parts, *_contributions(data.rows("contributions"), epochs)]


_MEASURES = {
    "accuracy": "Accuracy by epoch",
    "loss": "Loss by epoch, in nats",
    "added_parameters": "Parameters of all seeds by epoch",
}
_LEARNED = "Accuracy, loss in nats, and the parameters of all seeds, by epoch; dashed lines are rollbacks."
_SAMPLES = legend([("training data", "swatch objective"), ("validation data, seeds", "swatch policy")])


def _curves(rows: Rows, epochs: int, rollbacks: Sequence[float], title: str) -> Element:
    plot = Plot(counting_axis(epochs), axis_for(rows.numbers("value")), HEIGHT)
    marks: list[Node] = [vertical(plot.across(epoch), 0, plot.height, "baseline") for epoch in rollbacks]
    for name, part in rows.by("data").items():
        points = list(zip(part.numbers("epoch"), part.numbers("value"), strict=True))
        marks.append(plot.curve(points, _KINDS[name]))
    drawn = plot.figure(*marks, title=title, x_title="epoch")
    return element("div", element("h4", title), drawn)


def _stages(data: GrownData, epochs: int) -> Element:
    caption = "One lane per slot over the epochs' decisions; a label names the blueprint that germinated there."
    drawn = lanes(_changes(data.changes), epochs, data.slots)
    return section("What its slots went through", figure(drawn, caption, stage_legend(), source=CHANGES))


def _contributions(rows: Rows, epochs: int) -> list[Element]:
    if not rows:
        return []
    plot = Plot(counting_axis(epochs), axis_for([0.0, *rows.numbers("contribution")]), HEIGHT)
    marks: list[Node] = [plot.level(0, "zero")]
    parts = rows.by("slot_name")
    for index, part in enumerate(parts.values()):
        points = list(zip(part.numbers("epoch"), part.numbers("contribution"), strict=True))
        marks.append(plot.curve(points, f"hue hue{index % HUES}"))
    drawn = plot.figure(*marks, title="Contribution of each slot's seed by epoch", x_title="epoch")
    entries = [(slot, f"swatch hue hue{index % HUES}") for index, slot in enumerate(parts)]
    caption = "Validation accuracy with the slot's seed less that without it."
    return [section("What its seeds contribute", figure(drawn, caption, legend(entries), source=CONTRIBUTIONS))]


def _reproduce(data: GrownData) -> Element:
    command = f"esper grow --config {shlex.quote(f'{data.run}/config.yaml')} --run-dir runs/again"
    return section(
        "How to reproduce this",
        element("pre", element("code", command)),
        element("details", element("summary", "All settings"), element("pre", settings_text(data.settings))),
    )
