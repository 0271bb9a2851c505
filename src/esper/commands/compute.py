"""The options that say where a command computes."""

from typing import Annotated

import tyro

from esper.experiments.workers import Backend

Computing = Annotated[Backend, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]
"""The type of a command's `--backend`, `--workers` and `--address`: `computing: Computing = LOCAL`."""
