"""Esper grows neural networks while they train."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.api import Decision, EpisodeConfig, Grower, GrowingModel, Score, adapt, attach, export, load, save

__version__ = "0.1.0"
"""The version of this package, by the rules of semantic versioning."""

__all__ = [
    "Decision",
    "EpisodeConfig",
    "Grower",
    "GrowingModel",
    "Score",
    "__version__",
    "adapt",
    "attach",
    "export",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    # Not at import: the command line is to answer before torch is there.
    if name not in __all__:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return vars(import_module("esper.api"))[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
