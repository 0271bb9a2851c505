"""What a growing model says of itself by way of its host: libraries and training loops ask their model for more than
its outputs, such as ``config`` and ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from esper.errors import ExportError

_WRITERS = ("save_pretrained", "push_to_hub")
"""Methods of Hugging Face's models that write the host alone."""


def attribute_of(host: nn.Module, name: str) -> Any:
    """The host's public attribute or method ``name``; a method that would write it without what grew only raises.

    Raises:
        AttributeError: it has none, or the name begins with an underscore.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    found = getattr(host, name)
    return _refused(name) if name in _WRITERS else found


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ExportError(
            f"{name} writes the model that you attached without what grew in it: write the growing model with "
            "esper.save(model, folder), or what model.finalize() returns with esper.export"
        )

    return refuse
