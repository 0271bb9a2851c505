"""`esper bench train`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from esper.config import Overrides, load_settings
from esper.devices import CPU
from esper.errors import ConfigError
from esper.experiments.bench_train import bench_train
from esper.experiments.settings import TrainSettings
from esper.ui.output import console_beside, print_json, say

ITERATIONS = 3


def command(
    config: Path | None = None,
    iterations: int = ITERATIONS,
    overrides: Overrides = (),
    json: bool = False,
) -> None:
    """Measure how many environment steps a second one core trains on, and where the time goes.

    Args:
        config: YAML file with the settings of a training; the defaults where it says nothing.
        iterations: Measured one by one; one more is profiled.
        json: Print a machine-readable last line.
    """
    console = console_beside(json)
    chosen = ("shards=1", f"iterations={iterations}")
    settings = load_settings(TrainSettings, config, (*chosen, *overrides))
    if settings.devices != (CPU,):
        raise ConfigError(f"one core of the CPU is measured, not {', '.join(settings.devices)}: leave devices out")

    def show(number: int, speed: float) -> None:
        say(console, f"iteration {number} of {settings.iterations}: {speed:.0f} environment steps a second")

    found = bench_train(settings, show)
    table = Table("part", "share of the time", box=None)
    for name, share in sorted(found.share.items(), key=lambda part: -part[1]):
        table.add_row(name, f"{share:.1%}")
    console.print(table)
    say(console, f"{found.env_steps_per_second:.0f} environment steps a second, the median; one process, one thread")
    if json:
        print_json(asdict(found))
