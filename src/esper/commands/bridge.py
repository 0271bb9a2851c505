"""`esper bridge`."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from esper.config.parsing import parse_yaml
from esper.dash.output import say
from esper.errors import RunError
from esper.runs.bridges.bridge import Bridge, flatten, load_logger
from esper.runs.bridges.tail import Tail
from esper.runs.lock import hold, is_held
from esper.runs.run_directory import RunDirectory

BRIDGES = "bridges"
"""The folder in a run's directory where bridges remember how far they have come."""


def command(
    run: Annotated[Path, tyro.conf.Positional],
    to: Literal["tensorboard", "wandb", "mlflow"],
    destination: str | None = None,
    follow: bool = False,
) -> None:
    """Carry a run's figures over to TensorBoard, Weights & Biases or MLflow, also while the run goes on.

    A later call goes on where this one stopped. What crosses are all figures by iteration, counts of seeds per stage,
    the spread of objectives and contributions, settings and metadata, rollbacks, anomalies, starts and stops.

    Args:
        run: Directory of the run.
        to: The tool.
        destination: Of TensorBoard a folder, by default RUN/bridges/tensorboard; of Weights & Biases a project or
            entity/project, by default esper; of MLflow a tracking URI, by default $MLFLOW_TRACKING_URI or files in
            RUN/bridges/mlflow.
        follow: Go on until the run ends, or Ctrl-C.
    """
    open_logger = load_logger(to)
    directory = RunDirectory.open(run)
    settings = flatten(parse_yaml(directory.config.read_bytes(), str(directory.config)))
    folder = _make(directory.path / BRIDGES)
    console = Console()
    with hold(folder / f"{to}.lock", f"esper bridge --to {to}"), Tail.open(directory.store) as tail:
        bridge = Bridge(to, open_logger, tail, folder, directory.path.absolute().name, settings, destination)
        with closing(bridge):
            if follow:
                say(console, "Ctrl-C stops the bridge, not the run")
                bridge.follow(lambda: is_held(directory.lock), lambda carried: say(console, _count(carried)))
            else:
                say(console, _count(bridge.carry()))
    if bridge.destination is not None:
        say(console, f"{to}: {_describe(to, bridge.destination)}")


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {folder} ({error.strerror}): work on a copy of the run") from error
    return folder


def _count(carried: int) -> str:
    return f"{carried} iterations carried over"


def _describe(to: str, destination: str) -> str:
    return f"tensorboard --logdir {shlex.quote(destination)}" if to == "tensorboard" else destination
