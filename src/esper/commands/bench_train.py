"""`esper bench train`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from esper.config import Overrides, load_settings
from esper.devices import CPU
from esper.errors import ConfigError
from esper.experiments.bench_operations import OperationsProfile, profile_operations
from esper.experiments.bench_train import bench_train
from esper.experiments.settings import TrainSettings
from esper.ui.output import console_beside, print_json, say

ITERATIONS = 3


def command(
    config: Path | None = None,
    iterations: int = ITERATIONS,
    overrides: Overrides = (),
    profile: bool = False,
    json: bool = False,
) -> None:
    """Measure how many environment steps a second one core trains on, and where the time goes.

    Args:
        config: YAML file with the settings of a training; the defaults where it says nothing.
        iterations: Measured one by one; one more is profiled.
        profile: Also tell the time by torch operation, and what bounds it.
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
    operations = profile_operations(settings) if profile else None
    if operations:
        _show(console, operations)
    if json:
        print_json(asdict(found) | ({"operations": asdict(operations)} if operations else {}))


def _show(console: Console, found: OperationsProfile) -> None:
    table = Table("operation", "calls a decision", "ms a decision", "share", box=None)
    for one in found.operations:
        table.add_row(one.name, f"{one.calls:.0f}", f"{one.milliseconds:.1f}", f"{one.share:.1%}")
    console.print(table)
    say(
        console,
        f"a decision of a random controller, with its training and validation: {found.fixed_milliseconds:.0f} ms "
        f"however many networks, and {found.milliseconds_per_network:.2f} ms for each: at most "
        f"{found.most_env_steps_per_second:.0f} environment steps a second, without policy and update",
    )
    say(
        console,
        f"matrix products: {found.flops_per_env_step / 1e6:.1f} MFLOP an environment step; at the "
        f"{found.flops_per_second / 1e9:.0f} GFLOP/s of a large one, "
        f"{found.arithmetic_env_steps_per_second:.0f} environment steps a second",
    )
