"""`esper tune`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from esper.commands.options import require_seed
from esper.config.loading import settings_text
from esper.files import write_atomically
from esper.lab.tuning import tune
from esper.tasks.registry import get_suite
from esper.train.settings import TrainSettings
from esper.train.workers import LocalWorkers

WORKERS = 2


def command(
    controller: Annotated[Literal["heuristic", "look", "periodic"], tyro.conf.Positional],
    suite: str = "tokens",
    environment_steps: int = 400_000,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Tune a hand-written controller by random search with successive halving, on training instances.

    Args:
        controller: Which one.
        suite: Name of the suite.
        environment_steps: Budget: decisions of single networks. Give it what a policy's training takes.
        seed: Draws candidates and instances.
        out: Also write the winner's settings to this YAML file.
    """
    require_seed(seed)
    began = time.perf_counter()
    rules = TrainSettings(suite=suite).rules
    with LocalWorkers(WORKERS) as workers:
        tuned = tune(controller, get_suite(suite), rules, environment_steps, seed, workers)
    console = Console()
    console.print(settings_text(tuned.settings), markup=False)
    console.print(
        f"score {tuned.score:.3f} on the instances of the last round (optimistic: chosen there); "
        f"{tuned.environment_steps} environment steps, {time.perf_counter() - began:.0f} s"
    )
    if out is not None:
        write_atomically(out, settings_text(tuned.settings))
