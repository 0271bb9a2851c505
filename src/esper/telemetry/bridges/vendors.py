"""The tools that there are bridges to. Their libraries are imported only when a bridge to them is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from esper.extras import require
from esper.telemetry.bridges.sink import Connect


@dataclass(frozen=True, slots=True)
class Vendor:
    """A tool: the library it needs and the extra that installs it, and the module with its sink."""

    library: str
    extra: str
    module: str

    def connect(self) -> Connect:
        """What opens a sink; ConfigError if the library is not installed."""
        require(self.extra, "this bridge", self.library)
        return cast("Connect", importlib.import_module(self.module).connect)


VENDORS = {
    "tensorboard": Vendor("tensorboardX", "tensorboard", "esper.telemetry.bridges.tensorboard"),
    "wandb": Vendor("wandb", "wandb", "esper.telemetry.bridges.wandb"),
    "mlflow": Vendor("mlflow", "mlflow", "esper.telemetry.bridges.mlflow"),
}
"""By the name that users ask for them."""
