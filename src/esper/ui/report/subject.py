"""What a report can be about: a training run, a grown model, a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.errors import RunError
from esper.experiments.comparison import Comparison
from esper.experiments.contest import is_contest, read_contest
from esper.experiments.evaluate import read_over_seeds
from esper.practice.run import GrowDirectory
from esper.tasks.suite import Split
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import MADE, RunDirectory
from esper.ui.figures.contest import contest_exhibits
from esper.ui.figures.exhibits import training_exhibits
from esper.ui.figures.record import Exhibit
from esper.ui.figures.standings import PLACES, exhibit_evaluation, over_seeds_source
from esper.ui.report.comparisons import contest_html, over_seeds_html
from esper.ui.report.grown import grown_html, load_grown
from esper.ui.report.training import load_report_data, report_html

PAGE = "report.html"
_MADE_BY = f"{MADE}, or the folder of a comparison of `esper compare`"


@dataclass(frozen=True)
class Report:
    """A page, and the figures and tables that belong to it."""

    html: str
    exhibits: Callable[[], list[Exhibit]]
    comparisons: Mapping[str, Comparison]
    """What it judges, by title."""


def report_on(path: Path) -> Report:
    """The report of a run or a comparison, also while it goes on.

    Raises:
        RunError, ConfigError: it is neither, nothing is done yet, or a file is damaged.
    """
    if not os.path.exists(path):  # unlike Path.exists, it takes names that no file can have
        raise RunError(f"no run at {path}: {_MADE_BY}")
    run = RunDirectory(path)
    if run.store.is_file() and run.config.is_file():
        with RunReader.open(run.store) as reader:
            grown = reader.metadata().get("command") == "grow"
        return _grown(GrowDirectory(path)) if grown else _trained(run)
    if path.is_dir() and is_contest(path):
        return _compared(path)
    raise RunError(f"{path} is neither a run nor a comparison: {_MADE_BY}")


def _trained(run: RunDirectory) -> Report:
    data = load_report_data(run)

    def exhibits() -> list[Exhibit]:
        return [*training_exhibits(run.store, data.comparisons, data.behaviour), data.health]

    return Report(report_html(data), exhibits, _titled(data.comparisons))


def _grown(run: GrowDirectory) -> Report:
    data = load_grown(run)
    return Report(grown_html(data), lambda: data.exhibits, {})


def _compared(folder: Path) -> Report:
    found = read_contest(folder)
    judged = {"configurations": found.configurations, **({} if found.arms is None else {"arms": found.arms})}
    return Report(contest_html(folder, found), lambda: contest_exhibits(found), judged)


def report_over_seeds(paths: Sequence[Path]) -> Report:
    """The report of several evaluated runs that differ in their training seed alone.

    Raises:
        RunError, ConfigError: they are something else.
    """
    found = read_over_seeds(paths)
    html = over_seeds_html(paths, found)
    exhibits = [one for each in exhibit_evaluation(found, over_seeds_source).values() for one in each.all()]
    return Report(html, lambda: exhibits, _titled(found))


def _titled(comparisons: Mapping[Split, Comparison]) -> dict[str, Comparison]:
    return {PLACES[split]: found for split, found in comparisons.items()}
