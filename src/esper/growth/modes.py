"""Training and evaluation modes, module by module."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(network: nn.Module) -> Generator[None]:
    """Afterwards every module of ``network`` is in the mode in which it was before, also where modes are mixed."""
    modes = [(module, module.training) for module in network.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
