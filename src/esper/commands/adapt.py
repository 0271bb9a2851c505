"""`esper adapt`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from esper.adaptation.report import Trial
from esper.config.loading import load_settings
from esper.control.rules.simple import Never
from esper.dash.formats import score
from esper.dash.output import console_beside, print_json, say
from esper.errors import ConfigError
from esper.practice.settings import GrowSettings
from esper.practice.shifts import BATCH, adapt_to_shift, change_data, measure_accuracy
from esper.practice.training import HostTraining
from esper.tasks.practice.registry import DataAccess, get_task
from esper.train.workers import prepare_process


def command(
    task: str | None = None,
    host: str | None = None,
    shift: str = "inversion",
    examples: int = 200,
    protect: float | None = None,
    seconds: float | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    download: bool = False,
    json: bool = False,
) -> None:
    """Adapt a trained host to data that have changed, and tell what was tried and what it is worth.

    The host learns a task and is frozen; then the data change, and `esper.adapt` tries what may grow where on a few of
    the changed examples. `esper.adapt` does the same for a model and data of your own.

    Args:
        task: What the host has learned: digits, mnist1d, fashion-mnist or cifar10; by default digits.
        host: The network: mlp, conv, resnet, vit or conv1d; by default as suits the task.
        shift: How the data change: noise, inversion, rotation, cycled or merged (classes).
        examples: Of the changed data, rounded up to batches of 50.
        protect: By which share the loss on old data, which the host has not learned, may rise; by default by any.
        seconds: To spend; by default whatever it takes.
        epochs: For the host to learn before; by default as suits task and host.
        seed: All randomness follows from it; by default 0.
        download: Fetch the data if they are not on this machine.
        json: Print the result as a machine-readable last line.
    """
    console = console_beside(json)
    prepare_process()
    if protect is not None and not 0 <= protect < math.inf:
        raise ConfigError(f"--protect {protect:g}: it must be 0 or more")
    if epochs is not None and epochs < 1:
        raise ConfigError(f"--epochs {epochs}: it must be 1 or more")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"--seconds {seconds:g}: it must be more than 0, and finite")
    named = {"task": task, "host": host, "seed": seed, "epochs": epochs, "controller": Never.name}
    given = [f"{name}={value}" for name, value in named.items() if value is not None]
    settings = load_settings(GrowSettings, None, given)
    training = HostTraining(settings, get_task(settings.task).load(DataAccess(download)))
    data = change_data(training.splits, shift, examples, protected=protect is not None)
    for number in range(1, settings.epochs + 1):
        training.epoch(number)
    learned = measure_accuracy(training.model, training.splits.test.in_order(BATCH))
    say(console, f"{settings.host} on {settings.task}, {settings.epochs} epochs: test accuracy {score(learned)}")
    found = adapt_to_shift(training, data, tolerance=protect, seconds=seconds)
    say(console, repr(found.adaptation))
    say(console, f"test data with {shift}: accuracy {score(found.accuracy)}, the host's {score(found.host_accuracy)}")
    if json:
        kept, source_loss = found.adaptation.kept, found.adaptation.source_loss
        print_json(
            {
                "learned": learned,
                "accuracy": found.accuracy,
                "host_accuracy": found.host_accuracy,
                "kept": None if kept is None else dict(kept.structure),
                "source_loss": None if math.isnan(source_loss) else source_loss,
                "retention": found.adaptation.retention._asdict(),
                "trials": [_describe(trial) for trial in found.adaptation.trials],
            }
        )


def _describe(trial: Trial) -> dict[str, Any]:
    """With nulls where training diverged: JSON has no infinity."""
    figures = (value if math.isfinite(value) else None for value in trial.found)
    return {**asdict(trial), "found": tuple(figures)}
