"""A LightningModule's step once more, without anybody hearing of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection


@contextmanager
def unheard(module: LightningModule) -> Generator[None]:
    """Within the block what ``module`` logs is dropped, and what its metrics take in is forgotten."""
    metrics = list(_metrics(module))
    for owner, name, metric in metrics:
        setattr(owner, name, metric.clone())
    logging = {name: method for name, method in vars(module).items() if name in _LOGGING}
    for name in _LOGGING:
        setattr(module, name, _dropped)
    try:
        yield
    finally:
        for name in _LOGGING:
            delattr(module, name)
        vars(module).update(logging)
        for owner, name, metric in metrics:
            setattr(owner, name, metric)


_LOGGING = ("log", "log_dict")


def _dropped(*_: Any, **__: Any) -> None:
    pass


def _metrics(module: nn.Module) -> Iterator[tuple[nn.Module, str, Metric | MetricCollection]]:
    """Every metric within ``module``, with its owner and its name there."""
    for name, child in module.named_children():
        if isinstance(child, Metric | MetricCollection):
            yield module, name, child
        else:
            yield from _metrics(child)
