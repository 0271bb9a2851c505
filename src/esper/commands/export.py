"""`esper export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor

from esper.config.loading import load_settings
from esper.errors import ConfigError
from esper.growth.export import Format, export
from esper.growth.persist import load
from esper.practice.run import GrowDirectory
from esper.practice.settings import GrowSettings
from esper.practice.training import build_host, first_inputs
from esper.tasks.practice.examples import Examples
from esper.tasks.practice.registry import DataAccess, get_task


def command(
    run: Annotated[Path, tyro.conf.Positional],
    to: Annotated[Format, tyro.conf.EnumChoicesFromValues],
    out: Path,
    fixed_batch: int | None = None,
    download: bool = False,
) -> None:
    """Write the model that a run of `esper grow` left as a file that needs no Esper.

    A fresh process that cannot import Esper first loads the file and must compute the same with it.

    Args:
        run: Directory of the run.
        to: pt2 (for torch.export.load), onnx, or safetensors (weights alone).
        out: The file to write; its name ends in .pt2, .onnx or .safetensors.
        fixed_batch: Examples in every batch that the file must take; for models that cannot be traced for any number.
        download: Fetch the run's data, which show the model's shapes, if they are not on this machine.
    """
    directory = GrowDirectory.open_own(run)
    settings = load_settings(GrowSettings, directory.config).model_copy(update={"device": "cpu"})
    splits = get_task(settings.task).load(DataAccess(download, settings.text))
    inputs = first_inputs(splits.train)
    fresh = build_host(settings, splits)
    fresh.release()  # the saved model brings its own slots
    plain = load(directory.model, fresh.host, inputs).finalize()
    if fixed_batch is not None:
        inputs = _batch_of(fixed_batch, splits.train)
    export(plain, inputs, to, out, fixed_batch=fixed_batch is not None)
    sys.stdout.write(f"exported: {out}\n")


def _batch_of(size: int, examples: Examples) -> Tensor:
    if not 1 <= size <= len(examples):
        raise ConfigError(f"--fixed-batch is {size}: give a number from 1 to {len(examples)}, as the run has examples")
    return next(examples.in_order(size)).inputs
