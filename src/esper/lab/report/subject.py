"""What a report can be about: a training run, a grown model, a comparison, several runs of one way of training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from esper.errors import RunError
from esper.lab.contest import is_contest, read_contest
from esper.lab.evaluate import read_over_seeds
from esper.lab.report.grown import report_grown
from esper.lab.report.page import Report
from esper.lab.report.training import report_configurations, report_over_seeds, report_training
from esper.runs.reader import RunReader
from esper.runs.run_directory import MADE, STUDY, RunDirectory

_MADE_BY = f"{MADE}, or the folder of a comparison of `esper compare`"


def report_on(paths: Sequence[Path]) -> Report:
    """The report of a run or a comparison, also while it goes on, or of several runs that differ in their seed alone.

    Raises:
        RunError, ConfigError: they are something else, nothing is done yet, or a file is damaged.
    """
    if len(paths) > 1:
        return report_over_seeds(paths, read_over_seeds(paths))
    (path,) = paths
    if not os.path.exists(path):  # unlike Path.exists, it takes names that no file can have
        raise RunError(f"no run at {path}: {_MADE_BY}")
    run = RunDirectory(path)
    if run.store.is_file() and run.config.is_file():
        with RunReader.open(run.store) as reader:
            grown = reader.metadata().get("command") == "grow"
        return report_grown(run) if grown else report_training(run)
    if path.is_dir() and is_contest(path):
        return report_configurations(path, read_contest(path))
    if (path / STUDY).is_file():
        raise RunError(f"{path} is a sweep, whose study is in {path / STUDY}: give the directory of one of its trials")
    raise RunError(f"{path} is neither a run nor a comparison: {_MADE_BY}")
