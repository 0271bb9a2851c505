"""`esper look`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from esper.config.loading import Overrides, load_settings
from esper.config.settings import compare_settings
from esper.control.rules.simple import Never
from esper.dash.formats import score
from esper.dash.output import console_beside, print_json, say, say_differences
from esper.errors import ConfigError
from esper.grower.apart import Counterfactual
from esper.practice.settings import GrowSettings
from esper.practice.training import HostTraining, example_losses
from esper.tasks.practice.registry import DataAccess, get_task
from esper.train.workers import prepare_process


def command(
    task: str | None = None,
    host: str | None = None,
    after: int = 5,
    examples: int = 256,
    draws: int = 3,
    layers: bool = False,
    seed: int | None = None,
    text: Path | None = None,
    config: Path | None = None,
    svg: Path | None = None,
    download: bool = False,
    overrides: Overrides = (),
    json: bool = False,
) -> None:
    """Show where a host would grow on a task, and by what, before anything is planted.

    The host learns by itself first; then one backward pass over training examples tells what every blueprint promises
    in every slot. `model.look` does the same for a model of your own.

    Args:
        task: What to learn: digits, mnist1d, fashion-mnist, cifar10 or charlm; by default digits.
        host: The network: mlp, conv, resnet, vit, conv1d or gpt; by default as suits the task.
        after: Epochs to learn before; 0 looks at a fresh host.
        examples: To look at, rounded up to whole minibatches.
        draws: Of the initial values of what might be planted.
        layers: Whether to tell of the host's own layers, too.
        seed: All randomness follows from it; by default 0.
        text: The UTF-8 file that charlm learns; by default the text of Python's help.
        config: YAML file with settings, as for `esper grow`.
        svg: File for a map of slots and blueprints.
        download: Fetch the data if they are not on this machine.
        json: Print the rows as a machine-readable last line.
    """
    console = console_beside(json)
    prepare_process()
    for option, value, least in (("--after", after, 0), ("--examples", examples, 2), ("--draws", draws, 1)):
        if value < least:
            raise ConfigError(f"{option} {value}: it must be {least} or more")
    if svg is not None and not svg.parent.is_dir():
        raise ConfigError(f"there is no folder {svg.parent} for the map: make it, or choose another for --svg")
    settings = _load_settings(after, config, overrides, {"task": task, "host": host, "seed": seed, "text": text})
    say_differences(
        console, f"settings of {settings.host} on {settings.task}", compare_settings(settings, settings.usual())
    )
    training = HostTraining(settings, get_task(settings.task).load(DataAccess(download, settings.text)))
    for number in range(1, after + 1):
        epoch = training.epoch(number)
        say(console, f"epoch {number}/{after}, accuracy {score(epoch.validation.accuracy)}")
    batches = training.splits.train.in_order(settings.batch_size)
    looked = training.model.look(
        example_losses, batches, examples=examples, draws=draws, layers=layers, seed=settings.seed
    )
    say(console, str(looked))
    if svg is not None:
        looked.to_svg(svg)
        say(console, f"map: {svg}")
    if json:
        print_json({"rows": [asdict(row) for row in looked.rows], "layers": [asdict(row) for row in looked.layers]})


def _load_settings(after: int, config: Path | None, overrides: Overrides, named: Mapping[str, object]) -> GrowSettings:
    """Those of a run of `esper grow` in which nothing grows, and which is long enough."""
    fixed = {**named, "controller": Never.name, "evidence": Counterfactual.DEPENDENCE.value}
    given = (*overrides, *(f"{name}={value}" for name, value in fixed.items() if value is not None))
    settings = load_settings(GrowSettings, config, given)
    return settings if after <= settings.epochs else load_settings(GrowSettings, config, (*given, f"epochs={after}"))
