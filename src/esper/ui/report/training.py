"""The page of a training run."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from esper.config import load_settings, settings_text
from esper.experiments.behaviour import Behaviour, read_behaviour
from esper.experiments.comparison import Comparison, compare_splits
from esper.experiments.results import read_evaluation
from esper.experiments.settings import TrainSettings
from esper.experiments.summary import TrainingSummary, summarise
from esper.files import write_atomically
from esper.tasks.suite import Split
from esper.telemetry.events import RolledBack, RunStarted
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import RunDirectory
from esper.ui.figures.behaviour import exhibit_behaviour
from esper.ui.figures.growing import FIGURES as GROWING
from esper.ui.figures.health import HEALTH, exhibit_health
from esper.ui.figures.learning import FIGURES as LEARNING
from esper.ui.figures.record import Exhibit, measured
from esper.ui.figures.rows import fetch
from esper.ui.figures.standings import evaluation_source, exhibit_evaluation
from esper.ui.formats import duration, score
from esper.ui.report.page import Again, Answer, Page, Section
from esper.ui.standings import PLACES, basis, conclude

_TITLES = {"heldout": "Is it better than not learning?", "transfer": "Does it carry over to new families?"}
_LEARNED, _TRIED = ("learning",), ("operations", "seeds", "rewards")
"""Figures on the page, by name: those of how the policy learned, and those of what it tried."""


@dataclass(frozen=True)
class ReportData:
    """A run as its page needs it."""

    run: str
    """The directory, as the reader would name it."""
    version: str
    """Of the Esper that began the run."""
    settings: TrainSettings
    settings_text: str
    summary: TrainingSummary
    comparisons: Mapping[Split, Comparison]
    """Empty before the run is evaluated."""
    behaviour: Behaviour | None
    """None before the run is evaluated."""
    figures: Mapping[str, Exhibit]
    """Of the training, by name."""
    health: Exhibit


def load_report_data(run: RunDirectory) -> ReportData:
    """Read a run, evaluated or not.

    Raises:
        RunError, ConfigError: a file of the run is damaged.
    """
    settings = load_settings(TrainSettings, run.config)
    results = read_evaluation(run.evaluation) if run.evaluation.exists() else []
    with RunReader.open(run.store) as reader:
        started = reader.events(RunStarted)
        summary = summarise(reader)
        rollbacks = Counter(event.trouble for event in reader.events(RolledBack))
    shown = [figure for figure in (*LEARNING, *GROWING) if figure.name in (*_LEARNED, *_TRIED)]
    (health,) = fetch(run.store, [HEALTH.text])
    return ReportData(
        str(run.path),
        started[0].esper_version if started else "unknown",
        settings,
        settings_text(settings),
        summary,
        compare_splits(results),
        read_behaviour(run.behaviour) if run.behaviour.exists() else None,
        {what.name: (what, rows) for what, rows in measured(run.store, shown)},
        exhibit_health(health, settings.ppo.target_kl, rollbacks),
    )


def write_report(run: RunDirectory) -> Path:
    """Write the run's report and return its path.

    Raises:
        RunError, ConfigError: a file of the run is damaged, or the report cannot be written.
    """
    write_atomically(run.report, report_html(load_report_data(run)))
    return run.report


def report_html(data: ReportData) -> str:
    """The whole page."""
    return Page(
        f"Esper: {Path(data.run).name}",
        "Did learning to grow networks help?",
        _facts(data),
        [_answer(data)],
        [*_training(data), *_evaluation(data), *_health(data)],
        _again(data),
    ).html()


def _facts(data: ReportData) -> str:
    summary, settings = data.summary, data.settings
    return (
        f"Run {data.run}: suite {settings.suite}, seed {settings.seed}, {summary.iterations} of {settings.iterations} "
        f"iterations, {summary.environment_steps:,} environment steps in {duration(summary.seconds)} "
        f"({summary.environment_steps_per_second:.0f} a second), Esper {data.version}."
    )


def _answer(data: ReportData) -> Answer:
    heldout = data.comparisons.get("heldout")
    if heldout is None:
        return _unmeasured(data)
    found = conclude(heldout)
    sentences, notes = [found.sentence], [basis(heldout)]
    if transfer := data.comparisons.get("transfer"):
        new = conclude(transfer, PLACES["transfer"])
        sentences.append(f"Families never trained on: {new.short.lower()}. {new.sentence}")
    if data.behaviour is not None and data.behaviour.iteration != data.summary.iterations:
        notes.append(f"The policy of iteration {data.behaviour.iteration} was evaluated.")
    return Answer(found.short, sentences, notes=notes)


def _unmeasured(data: ReportData) -> Answer:
    """What training alone tells, and how to learn the rest."""
    summary, sentences = data.summary, list[str]()
    if summary.probe_score is not None and summary.baselines:
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        sentences.append(
            f"During training the greedy policy scored {score(summary.probe_score)} on a few training problems, the "
            f"best baseline there, {best}, {score(summary.baselines[best])}; that is no answer yet."
        )
    sentences.append("To compare the policy with all baselines on instances that nobody trained on, run")
    return Answer("Not measured yet", sentences, f"esper evaluate {shlex.quote(data.run)}")


def _training(data: ReportData) -> list[Section]:
    title = "How the policy learned"
    if "J" not in data.figures["learning"][1].by("kind"):
        return [Section(title, note="The run has no finished iteration yet.")]
    tried = Section("What it tried", [data.figures[name] for name in _TRIED])
    learned = Section(title, [data.figures[name] for name in _LEARNED])
    return [learned, tried] if data.figures["operations"][1] else [learned]


def _evaluation(data: ReportData) -> list[Section]:
    """How the policy compares with the others, and what it does."""
    evaluated = exhibit_evaluation(data.comparisons, evaluation_source)
    compared = [
        Section(_TITLES[split], [one.scores, one.differences, one.standings, one.growth, one.families])
        for split, one in evaluated.items()
    ]
    if data.behaviour is None:
        return compared
    did = exhibit_behaviour(data.behaviour)
    gradients = [did.gradients] if data.behaviour.gradients else []
    earned = [did.earnings, did.pairs] if did.earnings[1] else []
    return [
        *compared,
        Section("What it uses where", [did.operations, did.blueprints, did.places, *gradients]),
        *(
            []
            if data.behaviour.earnings is None
            else [Section("What the kept seeds earned", earned, "" if earned else "The policy kept no seed.")]
        ),
        Section("What the policy does", [did.episodes]),
    ]


def _health(data: ReportData) -> list[Section]:
    return [Section("Was training healthy?", [data.health])] if data.health[1] else []


def _again(data: ReportData) -> Again:
    config = shlex.quote(f"{data.run}/config.yaml")
    return Again(
        "How to reproduce this",
        data.settings_text,
        "The same version of Esper with the same settings gives the same run, whatever the number of cores. "
        "All randomness follows from the seed in the settings.",
        f"esper train --config {config} --run-dir runs/again\nesper evaluate runs/again",
    )
