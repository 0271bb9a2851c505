"""A model that is called as its host is, and shows it: libraries read signatures to learn what a model takes."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, TypeVar, cast

from torch import nn

M = TypeVar("M", bound=nn.Module)


@cache
def called_as(model: type[M], host: type[nn.Module]) -> type[M]:
    """The subclass of ``model`` for hosts of class ``host``: its ``forward`` has the signature of theirs.

    Its name is theirs, too, behind "Growing". A class, not an instance, since libraries ask classes (Hugging Face's
    `find_labels`), and since instances with a ``forward`` of their own would share it with their copies.
    """

    def forward(self: M, *arguments: Any, **keywords: Any) -> Any:
        return model.forward(self, *arguments, **keywords)

    forward.__doc__ = host.forward.__doc__
    vars(forward)["__signature__"] = inspect.signature(host.forward)
    name = f"Growing{host.__name__}"
    members = {"__module__": model.__module__, "__doc__": model.__doc__, "forward": forward}
    return cast("type[M]", type(name, (model,), members))


def unmade(model: type[M], host: type[nn.Module]) -> M:
    """An instance of `called_as`'s class without any state: where copies and pickles begin."""
    made = called_as(model, host)
    return made.__new__(made)
