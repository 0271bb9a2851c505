"""Short runs on digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from esper.config.loading import dump_settings, load_settings
from esper.practice.result import GrowResult
from esper.practice.run import GrowDirectory, GrowRun
from esper.practice.settings import GrowSettings
from esper.practice.training import Epoch, HostTraining
from esper.tasks.practice.examples import Splits
from esper.tasks.practice.registry import DataAccess, get_task

QUICK = ("task=digits", "host=mlp", "batch_size=512", "epochs=4")


def settings(*overrides: str) -> GrowSettings:
    return load_settings(GrowSettings, None, [*QUICK, *overrides])


@cache
def digits() -> Splits:
    return get_task("digits").load(DataAccess())


def growth(*overrides: str) -> HostTraining:
    return HostTraining(settings(*overrides), digits())


def quiet(epoch: Epoch) -> None:
    """Show nothing."""


def grow(path: Path, *overrides: str, show: Callable[[Epoch], None] = quiet) -> GrowResult:
    """Begin a run or go on with it, to its end."""
    if path.exists():
        run = GrowDirectory.open(path)
    else:
        run = GrowDirectory.create(path)
        dump_settings(settings(*overrides), run.config)
    with run.locked("a test"), run.open_store() as store:
        growing = GrowRun(run, HostTraining(load_settings(GrowSettings, run.config), digits()), store)
        growing.train(show)
        return growing.conclude()
