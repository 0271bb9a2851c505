"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import shlex
from pathlib import Path

from esper.files import write_atomically
from esper.telemetry.run_directory import RunDirectory
from esper.ui.figures.evaluation import evaluation_source
from esper.ui.formats import duration, score
from esper.ui.report.comparison import comparison_section
from esper.ui.report.data import ReportData, load_report_data
from esper.ui.report.document import document
from esper.ui.report.earnings import earnings_section
from esper.ui.report.episodes import episodes_section
from esper.ui.report.habits import habits_section
from esper.ui.report.layout import section
from esper.ui.report.learning import health_section, learning_section
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.tried import tried_section
from esper.ui.standings import basis
from esper.ui.verdict import PLACES, answer

_PLACES = {"heldout": "new instances of the families trained on", "transfer": "instances of families never trained on"}
_TITLES = {"heldout": "Is it better than not learning?", "transfer": "Does it carry over to new families?"}


def write_report(run: RunDirectory) -> Path:
    """Write the run's report and return its path.

    Raises:
        RunError, ConfigError: a file of the run is damaged, or the report cannot be written.
    """
    write_atomically(run.report, report_html(load_report_data(run)))
    return run.report


def report_html(data: ReportData) -> str:
    """The whole page."""
    return document(f"Esper: {Path(data.run).name}", *_content(data))


def _content(data: ReportData) -> list[Node]:
    parts: list[Node | None] = [
        element("h1", "Did learning to grow networks help?"),
        element("p", _facts(data), class_="facts"),
        *_answers(data),
        learning_section(data),
        tried_section(data),
        *(
            comparison_section(_TITLES[split], found, _PLACES[split], evaluation_source(split))
            for split, found in data.comparisons.items()
        ),
    ]
    if data.behaviour is not None:
        parts += [habits_section(data.behaviour), earnings_section(data.behaviour), episodes_section(data.behaviour)]
    parts += [health_section(data), _reproduce(data)]
    return [part for part in parts if part is not None]


def _facts(data: ReportData) -> str:
    summary, settings = data.summary, data.settings
    return (
        f"Run {data.run}: suite {settings.suite}, seed {settings.seed}, {summary.iterations} of {settings.iterations} "
        f"iterations, {summary.environment_steps:,} environment steps in {duration(summary.seconds)} "
        f"({summary.environment_steps_per_second:.0f} a second), Esper {data.version}."
    )


def _answers(data: ReportData) -> list[Node]:
    heldout = data.comparisons.get("heldout")
    if heldout is None:
        return [_box("Not measured yet", _unmeasured(data))]
    found = answer(heldout)
    parts: list[Node] = [element("strong", found.short), element("p", found.sentence)]
    if transfer := data.comparisons.get("transfer"):
        new = answer(transfer, PLACES["transfer"])
        parts.append(element("p", element("b", f"Families never trained on: {new.short.lower()}. "), new.sentence))
    parts.append(element("p", basis(heldout), class_="note"))
    if data.behaviour is not None and data.behaviour.iteration != data.summary.iterations:
        parts.append(element("p", f"The policy of iteration {data.behaviour.iteration} was evaluated.", class_="note"))
    return [element("div", *parts, class_="answer")]


def _unmeasured(data: ReportData) -> Element:
    """What training alone tells, and how to learn the rest."""
    command = element("code", f"esper evaluate {shlex.quote(data.run)}")
    summary = data.summary
    hint = ""
    if summary.probe_score is not None and summary.baselines:
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        hint = (
            f"During training the greedy policy scored {score(summary.probe_score)} on a few training problems, the "
            f"best baseline there, {best}, {score(summary.baselines[best])}; that is no answer yet. "
        )
    return element(
        "p", hint, "To compare the policy with all baselines on instances that nobody trained on, run ", command, "."
    )


def _box(short: str, content: Node) -> Element:
    return element("div", element("strong", short), content, class_="answer")


def _reproduce(data: ReportData) -> Element:
    config = shlex.quote(f"{data.run}/config.yaml")
    commands = f"esper train --config {config} --run-dir runs/again\nesper evaluate runs/again"
    return section(
        "How to reproduce this",
        element(
            "p",
            "The same version of Esper with the same settings gives the same run, whatever the number of cores. "
            "All randomness follows from the seed in the settings.",
        ),
        element("pre", element("code", commands)),
        element("details", element("summary", "All settings"), element("pre", data.settings_text)),
    )
