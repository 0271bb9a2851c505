"""What several evaluated runs, which differ in their training seed, say of the way in which they were trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from esper.config import load_settings
from esper.errors import ConfigError, RunError
from esper.experiments.behaviour import read_behaviour
from esper.experiments.comparison import Comparison, compare_over_seeds
from esper.experiments.results import SPLITS, of_split, read_results
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.settings import compare_settings
from esper.tasks.suite import Split

_SEED = "seed"


def read_over_seeds(paths: Sequence[Path]) -> dict[Split, Comparison]:
    """By split that every run was evaluated on.

    Raises:
        RunError: one is no run, is not evaluated, or they were evaluated differently or after other iterations.
        ConfigError: they differ in more than their seed, or two have the same one.
    """
    runs = [RunDirectory.open_own(path) for path in paths]
    _require_one_way(paths, [load_settings(TrainSettings, run.config) for run in runs])
    results = [read_results(run.evaluation) for run in runs]
    _require_one_length(runs)
    found: dict[Split, Comparison] = {}
    for split in SPLITS:
        played = [of_split(own, split) for own in results]
        if all(played):
            try:
                found[split] = compare_over_seeds(played)
            except ValueError as error:
                raise RunError(f"{error}: evaluate them all with the same --instances and --transfer") from error
    return found


def _require_one_way(paths: Sequence[Path], trained: Sequence[TrainSettings]) -> None:
    for path, settings in zip(paths[1:], trained[1:], strict=True):
        differ = [one.key for one in compare_settings(settings, trained[0]) if one.key != _SEED]
        if differ:
            raise ConfigError(
                f"{path} was trained with other settings than {paths[0]} ({', '.join(differ)}): give runs that "
                "differ in their seed alone, or compare ways of training with `esper compare`"
            )
    seeds = [settings.seed for settings in trained]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(f"two of the runs have training seed {twice}: give every seed once")


def _require_one_length(runs: Sequence[RunDirectory]) -> None:
    played = [read_behaviour(run.behaviour).iteration for run in runs]
    for run, iteration in zip(runs, played, strict=True):
        if iteration != played[0]:
            raise RunError(
                f"{run.path} was evaluated after iteration {iteration}, {runs[0].path} after {played[0]}: train them "
                "equally long and evaluate them again"
            )
