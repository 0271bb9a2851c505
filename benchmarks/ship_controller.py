"""Make a run's policy the one that comes with Esper.

    python benchmarks/ship_controller.py RUN

Writes its settings and the weights of its newest checkpoint, without the optimizer, into `src/esper/control/shipped`.
The card beside them is written by hand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import tyro
from rich.console import Console

from esper.config.loading import load_settings
from esper.control.shipped import ESPER, open_policy
from esper.runs.run_directory import RunDirectory
from esper.serialization.checkpoints import Checkpoints
from esper.train.settings import TrainSettings

MOST_BYTES = 2 * 10**6


def main(run: tyro.conf.Positional[Path]) -> None:
    """Replace what is shipped."""
    source, shipped = RunDirectory.open_training_run(run), open_policy(ESPER)
    if load_settings(TrainSettings, source.config).start_from not in (None, ESPER):
        raise SystemExit("it started from a run that nobody else has: ship one that says all that it learned from")
    newest = Checkpoints(source.checkpoints).latest()
    shutil.rmtree(shipped.checkpoints, ignore_errors=True)
    policy = {name: tensor for name, tensor in newest.tensors.items() if name.startswith("policy.")}
    saved = Checkpoints(shipped.checkpoints).save(newest.iteration, policy, {})
    shutil.copyfile(source.config, shipped.config)
    size = saved.path.stat().st_size
    Console().print(f"{saved.path}: {size} bytes, {saved.sha256}")
    if size > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES} bytes are too many for a package")


if __name__ == "__main__":
    tyro.cli(main)
