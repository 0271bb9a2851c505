"""Everything the report tells, read from a run directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from esper.config import load_settings, settings_text
from esper.experiments.behaviour import Behaviour, read_behaviour
from esper.experiments.comparison import Comparison, compare_splits
from esper.experiments.results import read_evaluation
from esper.experiments.settings import TrainSettings
from esper.experiments.summary import TrainingSummary, summarise
from esper.tasks.suite import Split
from esper.telemetry.events import RolledBack, RunStarted
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import RunDirectory
from esper.ui.figures.growing import REWARDS, SEEDS
from esper.ui.figures.health import HEALTH
from esper.ui.figures.learning import LEARNING, OPERATIONS
from esper.ui.figures.record import Query
from esper.ui.figures.rows import Rows, fetch

QUERIES = (LEARNING, OPERATIONS, SEEDS, REWARDS, HEALTH)
"""Behind the page's own figures."""


@dataclass(frozen=True)
class ReportData:
    """A run as the report needs it."""

    run: str
    """The directory, as the reader would name it."""
    version: str
    """Of the Esper that began the run."""
    settings: TrainSettings
    settings_text: str
    summary: TrainingSummary
    rollbacks: Mapping[str, int]
    """How often the governor stepped in during training, by what the trouble was."""
    comparisons: Mapping[Split, Comparison]
    """Empty before the run is evaluated."""
    behaviour: Behaviour | None
    """None before the run is evaluated."""
    rows: Mapping[Query, Rows]
    """What `QUERIES` give: all that the page draws of them."""


def load_report_data(run: RunDirectory) -> ReportData:
    """Read a run, evaluated or not.

    Raises:
        RunError, ConfigError: a file of the run is damaged.
    """
    settings = load_settings(TrainSettings, run.config)
    results = read_evaluation(run.evaluation) if run.evaluation.exists() else []
    with RunReader.open(run.store) as reader:
        started = reader.events(RunStarted)
        return ReportData(
            str(run.path),
            started[0].esper_version if started else "unknown",
            settings,
            settings_text(settings),
            summarise(reader),
            Counter(event.trouble for event in reader.events(RolledBack)),
            compare_splits(results),
            read_behaviour(run.behaviour) if run.behaviour.exists() else None,
            dict(zip(QUERIES, fetch(run.store, [query.text for query in QUERIES]), strict=True)),
        )
