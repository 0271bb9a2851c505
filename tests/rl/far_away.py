"""A device whose values nobody can read: what would wait for an accelerator fails there, or is counted.

It is torch's meta device. To branch on one of its values, to index by a mask or to look for what is not zero raises, as
there is nothing to look at; these are just the operations that make the CPU wait for an accelerator. Transfers are
counted, and give zeros.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import esper

FAR = torch.device("meta")
_CPU = torch.device("cpu")
_HOME = Path(esper.__file__).parent


class FarAway(TorchFunctionMode):
    """While active, notes where Esper moves tensors and where it computes with tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        """Places where values are fetched; each makes the CPU wait."""
        self.waits: list[str] = []
        """Places where values are sent, and the CPU waits until they are there."""
        self.mixtures: list[str] = []
        """Places where tensors of both devices meet."""

    def forget(self) -> None:
        """Begin anew."""
        for places in (self.reads, self.waits, self.mixtures):
            places.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.allclose:
            return True  # called once, to find out the architecture
        if func in (Tensor.to, Tensor.cpu):
            return self._moved(func, args, kwargs)
        found = func(*args, **kwargs)
        # Numbers without an axis may be anywhere: torch hands them over as arguments.
        if len({tensor.device for tensor in _tensors([args, kwargs]) if tensor.dim() or tensor.is_meta}) > 1:
            self._mixed(func)
        return found

    def _moved(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, *rest = args
        named = [one for one in (*rest, *kwargs.values()) if isinstance(one, Tensor | torch.device | str)]
        if tensor.is_meta and (func is Tensor.cpu or any(_device(one) == _CPU for one in named)):
            self.reads.append(_place())
            return func(torch.zeros_like(tensor, device=_CPU), *rest, **kwargs)
        found = func(*args, **kwargs)
        prompt = kwargs.get("non_blocking", any(one is True for one in rest))  # modules hand it over by place
        if found.is_meta and not tensor.is_meta and not prompt:
            self.waits.append(_place())
        return found

    def _mixed(self, func: Callable[..., Any]) -> None:
        if func is Tensor.__getitem__:
            self.waits.append(_place())  # an index on the CPU is sent first
        elif func is not torch._has_compatible_shallow_copy_type:  # how a module finds out how to move
            self.mixtures.append(_place())


def _device(named: Tensor | torch.device | str) -> torch.device:
    return named.device if isinstance(named, Tensor) else torch.device(named)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _place() -> str:
    """The innermost function of Esper that is running, by file and name."""
    for frame in reversed(traceback.extract_stack()):
        if _HOME in Path(frame.filename).parents:
            return f"{Path(frame.filename).relative_to(_HOME)} {frame.name}"
    return "elsewhere"
