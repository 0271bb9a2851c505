"""Does growth pay on ordinary hosts? Bare, with everything from the start, grown by two rules and by a policy.

The bare host is trained twice: for as many epochs as the grown ones, and for as many more as the rule that looks spent
more FLOPs.

`python benchmarks/practice.py FOLDER --seeds 0 1 2 3 4` trains every host/task pair in each of these ways, prints a
table of means over seeds, and writes all runs' results to FOLDER/practice.json. Stopped, it goes on: runs that are done
are only read, one under way goes on from its last epoch. It computes in one thread.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from esper.config.loading import dump_settings, load_settings
from esper.control.shipped import ESPER
from esper.dash.output import say
from esper.errors import ConfigError, EsperError, TaskError
from esper.files import write_atomically
from esper.practice.result import GrowResult, read_result
from esper.practice.run import GrowDirectory, GrowRun
from esper.practice.settings import ALL_FROM_START, GrowSettings
from esper.practice.training import HostTraining
from esper.tasks.practice.examples import Splits
from esper.tasks.practice.registry import DataAccess, get_task
from esper.train.workers import prepare_process

ARMS = {
    "bare host": "none",
    "everything from the start": ALL_FROM_START,
    "grown by the heuristic": "heuristic",
    "grown by the rule that looks": "look",
    "grown by the shipped policy": ESPER,
}
"""Controllers by what they are called in the table."""
LONGER = "bare host, as many FLOPs"
"""How the table calls the host by itself, trained for the FLOPs that the rule that looks took."""
PAIRS = (("fashion-mnist", "resnet"), ("digits", "vit"), ("charlm", "gpt"), ("mnist1d", "conv1d"))
INSTEAD = {"fashion-mnist": "digits"}
"""What to learn where a data set is not on this machine."""
TABLE_WIDTH = 120
_RESULTS = TypeAdapter(list[GrowResult])


@dataclass(frozen=True)
class Pair:
    """A host with the data that it learns."""

    task: str
    host: str
    splits: Splits


def main(
    folder: tyro.conf.Positional[Path],
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    tasks: tuple[str, ...] = tuple(task for task, _ in PAIRS),
    epochs: int | None = None,
    overrides: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
) -> None:
    """Train, compare, print.

    Args:
        folder: Keeps the runs.
        seeds: One run per seed, pair and way.
        tasks: Which pairs, by task.
        epochs: Of every run; by default as the host's recipe says.
        overrides: Further settings of `esper grow`, for all runs.
    """
    prepare_process()
    console = Console()
    results: list[GrowResult] = []
    for pair in _pairs(tasks):
        for seed in seeds:
            for controller in ARMS.values():
                settings = _settings(pair, controller, seed, epochs, overrides)
                results.append(run_to_end(_path(folder, pair, controller, seed), settings, pair.splits))
                say(console, _line(results[-1]))
            bare, looked = (
                _find(results, pair, seed, ARMS[how]) for how in ("bare host", "grown by the rule that looks")
            )
            more = round(bare.epochs * looked.training_flops / bare.training_flops)
            settings = _settings(pair, bare.controller, seed, more, overrides)
            result = run_to_end(_path(folder, pair, LONGER, seed), settings, pair.splits)
            results.append(replace(result, controller=LONGER))
            say(console, _line(results[-1]))
    write_atomically(folder / "practice.json", _RESULTS.dump_json(results, indent=2))
    Console(width=TABLE_WIDTH).print(_table(results))


def _pairs(tasks: Sequence[str]) -> list[Pair]:
    unknown = set(tasks) - {task for task, _ in PAIRS}
    if unknown:
        raise ConfigError(f"no pair has task {min(unknown)!r}: choose from {', '.join(task for task, _ in PAIRS)}")
    return [_pair(task, host) for task, host in PAIRS if task in tasks]


def _pair(task: str, host: str) -> Pair:
    try:
        return Pair(task, host, get_task(task).load(DataAccess()))
    except TaskError:
        if task not in INSTEAD:
            raise
        return _pair(INSTEAD[task], host)


def _path(folder: Path, pair: Pair, how: str, seed: int) -> Path:
    return folder / f"{pair.task}-{pair.host}" / how / str(seed)


def _find(results: Sequence[GrowResult], pair: Pair, seed: int, controller: str) -> GrowResult:
    wanted = (pair.task, pair.host, controller, seed)
    return next(one for one in results if (one.task, one.host, one.controller, one.seed) == wanted)


def _settings(pair: Pair, controller: str, seed: int, epochs: int | None, overrides: Sequence[str]) -> GrowSettings:
    own = [f"task={pair.task}", f"host={pair.host}", f"controller={controller}", f"seed={seed}"]
    return load_settings(GrowSettings, None, [*overrides, *own, *([] if epochs is None else [f"epochs={epochs}"])])


def run_to_end(path: Path, settings: GrowSettings, splits: Splits) -> GrowResult:
    """Of the run in the directory ``path``, which is begun or gone on with if need be.

    Raises:
        ConfigError: the directory holds a run of other settings.
        RunError: it cannot be written, or is in use.
    """
    if (path / "config.yaml").exists():
        directory = GrowDirectory.open_own(path)
        if load_settings(GrowSettings, directory.config) != settings:
            raise ConfigError(f"{path} holds a run of other settings: choose another folder")
    else:
        directory = GrowDirectory.create(path)
    if directory.result.exists():
        return read_result(directory.result)
    with directory.locked(Path(sys.argv[0]).name):
        dump_settings(settings, directory.config)
        with directory.open_store() as store:
            run = GrowRun(directory, HostTraining(settings, splits), store)
            run.train(lambda epoch: None)  # noqa: ARG005
            return run.conclude()


def _line(result: GrowResult) -> str:
    return (
        f"{result.host} on {result.task}, {result.controller}, seed {result.seed}: accuracy {result.accuracy:.4f}, "
        f"{result.host_parameters} + {result.added_parameters} parameters, {result.seconds:.1f} s"
    )


def _table(results: Sequence[GrowResult]) -> Table:
    table = Table(box=None, header_style="underline")
    for name in ("host on task", "how", "accuracy", "loss", "parameters", "training GFLOP", "seconds", "learning"):
        table.add_column(name, justify="left" if name in ("host on task", "how") else "right", no_wrap=True)
    for task, host in dict.fromkeys((one.task, one.host) for one in results):
        for how, controller in (*ARMS.items(), (LONGER, LONGER)):
            runs = [one for one in results if (one.task, one.host, one.controller) == (task, host, controller)]
            table.add_row(
                f"{host} on {task}",
                how,
                _spread([100 * one.accuracy for one in runs], 1),
                _spread([one.loss for one in runs], 3),
                f"{statistics.mean(one.host_parameters + one.added_parameters for one in runs):,.0f}",
                f"{statistics.mean(one.training_flops for one in runs) / 1e9:,.1f}",
                f"{statistics.mean(one.seconds for one in runs):.1f}",
                f"{statistics.mean(one.learning_seconds for one in runs):.1f}",
            )
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
