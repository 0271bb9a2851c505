"""`esper bench telemetry`."""

from __future__ import annotations

from dataclasses import asdict

from esper.config import load_settings
from esper.errors import ConfigError
from esper.experiments.bench_telemetry import measure_rate, measure_share
from esper.experiments.settings import TrainSettings
from esper.ui.output import console_beside, print_json, say


def command(seconds: float = 3.0, iterations: int = 5, environments: int = 32, json: bool = False) -> None:
    """Measure how many events a second a run store takes while somebody follows it, and what telemetry costs training.

    Args:
        seconds: For how long the store is written, as fast as it goes.
        iterations: Of a training run in this process; its figures are medians over them.
        environments: Networks that train side by side, a multiple of the default group of 8.
        json: Print a machine-readable last line.
    """
    if seconds <= 0 or iterations < 1:
        raise ConfigError("seconds must be above 0, iterations at least 1")
    overrides = (f"iterations={iterations}", f"environments={environments}", "shards=1")
    settings = load_settings(TrainSettings, None, overrides)
    console = console_beside(json)
    say(console, f"events of four slots, for {seconds:g} s, followed by another process ...")
    rate = measure_rate(seconds)
    say(console, f"{rate.events} events: {rate.written:.0f}/s committed, {rate.followed:.0f}/s followed\n")
    say(console, f"training of {environments} networks for {iterations} iterations ...")
    share = measure_share(settings)
    say(
        console,
        f"telemetry takes {share.share:.2%} of the CPU time: {share.events_per_step:.2f} events "
        f"per environment step, {share.microseconds:.0f} microseconds each",
    )
    if json:
        print_json(
            {
                "events_per_second": rate.followed,
                "cpu_share": share.share,
                "rate": asdict(rate),
                "training": asdict(share),
            }
        )
