"""`esper grow`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from esper.commands.options import hold_run
from esper.config.loading import Overrides, load_settings
from esper.config.settings import compare_settings
from esper.dash.formats import mega, score, time_taken
from esper.dash.growth import GrowthView
from esper.dash.output import console_beside, print_json, say, say_differences
from esper.errors import ConfigError
from esper.grower.decision import Ending
from esper.practice.result import GrowResult
from esper.practice.run import GrowDirectory, GrowRun
from esper.practice.settings import GrowSettings
from esper.practice.training import HostTraining
from esper.tasks.practice.registry import DataAccess, get_task
from esper.train.workers import prepare_process


def command(
    task: str | None = None,
    host: str | None = None,
    controller: str | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    rent: float | None = None,
    text: Path | None = None,
    config: Path | None = None,
    run_dir: Path | None = None,
    resume: Path | None = None,
    download: bool = False,
    overrides: Overrides = (),
    json: bool = False,
) -> None:
    """Grow one model on one task, under a controller of your choice.

    A host is trained by AdamW; after every epoch the controller decides what germinates, stays or goes. In the end
    what is unfinished is judged, and the host with what stays is measured on test data, and saved.

    Args:
        task: What to learn: digits, mnist1d, fashion-mnist, cifar10 or charlm; by default digits.
        host: The network that grows: mlp, conv, resnet, vit, conv1d or gpt; by default as suits the task.
        controller: Who decides: look (the default), heuristic, none, random, periodic, all_at_start, all_at_plateau,
            all_from_start, esper (the policy that comes with Esper), or the directory of a run of `esper train`, whose
            policy it is.
        epochs: Passes over the training data, and so decisions; by default as suits task and host.
        seed: All randomness follows from it; by default 0.
        rent: What growth costs, by default nothing; the score is accuracy - rent * log1p(added / host parameters).
        text: The UTF-8 file that charlm learns; by default the text of Python's help.
        config: YAML file with settings; what it does not say follows from task and host.
        run_dir: Directory for the run, new or empty; by default one under runs/ named by the time.
        resume: Directory of a run to go on with, from its last whole epoch and with its own settings.
        download: Fetch the data if they are not on this machine.
        json: Print the result as a machine-readable last line; progress then goes to stderr.
    """
    console = console_beside(json)
    prepare_process()
    named = {
        "task": task,
        "host": host,
        "controller": controller,
        "epochs": epochs,
        "seed": seed,
        "rent": rent,
        "text": text if text is None else text.absolute(),  # a resumed run may be elsewhere
    }
    given = (*overrides, *(f"{name}={value}" for name, value in named.items() if value is not None))
    if resume is None:
        settings = load_settings(GrowSettings, config, given)
        say_differences(
            console, f"settings of {settings.host} on {settings.task}", compare_settings(settings, settings.usual())
        )
    elif config or run_dir or given:
        raise ConfigError("--resume goes on with the run's own settings and directory: give no others beside it")
    else:
        settings = load_settings(GrowSettings, GrowDirectory.open_own(resume).config)
    training = HostTraining(settings, get_task(settings.task).load(DataAccess(download, settings.text)))
    with hold_run(GrowDirectory, resume, run_dir, settings, console) as run:
        result = _grow(run, training, console)
    _conclude(console, run, result)
    if json:
        print_json({"run": str(run.path), **asdict(result)})


def _grow(run: GrowDirectory, training: HostTraining, console: Console) -> GrowResult:
    """Do what remains of the run."""
    with run.open_store() as store:
        growing = GrowRun(run, training, store)
        if growing.done:
            say(console, f"going on after epoch {growing.done} of {training.settings.epochs}")
        with GrowthView(console, training.settings.epochs, growing.done) as view:
            growing.train(view.epoch)
        if growing.done < training.settings.epochs:
            say(console, f"stopped on a plateau: {training.settings.conduct.plateau} epochs without a better loss")

        def show_ending(ending: Ending) -> None:
            for line in ending.lines if ending.changes else ():
                say(console, line)

        return growing.conclude(show_ending)


def _conclude(console: Console, run: GrowDirectory, result: GrowResult) -> None:
    grown = f"{result.host_parameters} parameters + {result.added_parameters}"
    for one in result.kept:
        say(console, f"kept {one.blueprint} in {one.slot}: {one.parameters} parameters")
    say(
        console,
        f"{result.host} on {result.task}: accuracy {score(result.accuracy)}, loss {score(result.loss)}, "
        f"score {score(result.score)} on test data; {grown}, {mega(result.training_flops)} MFLOP of training, "
        f"{time_taken(result.seconds)}",
    )
    say(console, f"model: {run.model}")
    say(console, f"run: {run.path}")
