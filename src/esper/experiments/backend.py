"""Where tasks are computed: in processes of this machine, or by Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from esper.errors import ConfigError
from esper.experiments.workers import LocalWorkers, Workers
from esper.extras import require


@dataclass(frozen=True)
class Backend:
    """Who computes. It changes how long results take, and nothing else."""

    backend: Literal["local", "ray"] = "local"
    """Processes of this machine, or Ray (extra ``ray``)."""
    workers: int | None = None
    """Tasks computed at a time; by default all there are, on this machine at most one per core."""
    address: str | None = None
    """A Ray cluster to compute in, as host:port or "auto"; by default Ray is started here, and ended with the
    command."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: ask for at least 1")
        if self.address is not None and self.backend != "ray":
            raise ConfigError("--address is that of a Ray cluster: add --backend ray")
        if self.backend == "ray":
            require("ray", "--backend ray", "ray")

    def open(self, tasks: int) -> Workers:
        """Workers for that many tasks side by side; use them as a context manager.

        Raises:
            ConfigError: there is no such cluster.
            RunError: Ray cannot be started.
        """
        cores = tasks if self.address else os.cpu_count() or 1
        most = max(min(tasks, cores), 1) if self.workers is None else self.workers
        if self.backend == "local":
            return LocalWorkers(most)
        from esper.experiments.ray_workers import RayWorkers  # noqa: PLC0415 (an extra, and seconds to import)

        return RayWorkers(most, self.address)


LOCAL = Backend()
"""Processes of this machine."""

Computing = Annotated[Backend, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]
"""The type of a command's `--backend`, `--workers` and `--address`: `computing: Computing = LOCAL`."""
