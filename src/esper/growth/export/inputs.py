"""What a model is called with, as tensors by position and by keyword."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.errors import ExportError
from esper.growth.probe import Arguments


@dataclass(frozen=True)
class Inputs:
    """Tensors, of which those as long as the first have the batch as first axis."""

    positional: tuple[Tensor, ...]
    keywords: dict[str, Tensor]

    @classmethod
    def of(cls, arguments: Arguments) -> Inputs:
        """The tensors in ``arguments``, on the CPU.

        Raises:
            ExportError: something else is among them, or nothing, one is empty, or the first has no axis for the batch.
        """
        positional: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        if isinstance(arguments, Tensor):
            positional = (arguments,)
        elif isinstance(arguments, tuple):
            positional = arguments
        else:
            keywords = dict(arguments)
        given = [*positional, *keywords.values()]
        strange = [type(one).__name__ for one in given if not isinstance(one, Tensor)]
        if strange:
            raise ExportError(
                f"the example input holds a {strange[0]}, but an exported model takes tensors only: "
                "wrap the model in a module that fills in the rest"
            )
        if not given or given[0].dim() == 0:
            raise ExportError("the example input needs a first tensor whose first axis is the batch")
        empty = [tuple(one.shape) for one in given if not one.numel()]
        if empty:
            raise ExportError(f"the example input has a tensor of shape {empty[0]}: give an example or more")
        return cls(tuple(one.cpu() for one in positional), {name: one.cpu() for name, one in keywords.items()})

    @property
    def batch(self) -> int:
        """How many examples there are."""
        return len(self.tensors[0])

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, positional ones first."""
        return [*self.positional, *self.keywords.values()]

    def has_batch(self, tensor: Tensor) -> bool:
        """Whether the first axis of ``tensor``, one of these, is the batch."""
        return tensor.dim() > 0 and len(tensor) == self.batch

    def drawn(self, batch: int, generator: torch.Generator) -> Inputs:
        """Random ones of another batch size.

        Floating-point ones are normal, as large as these. Others, and those with infinities, may be indices and masks
        that belong together: of them come examples of these, and what has no batch stays as it is.
        """
        examples = torch.randint(self.batch, (batch,), generator=generator)

        def draw(like: Tensor) -> Tensor:
            if like.is_floating_point() and like.isfinite().all():
                shape = (batch, *like.shape[1:]) if self.has_batch(like) else like.shape
                noise = torch.randn(shape, generator=generator).to(like.dtype)
                return like.mean() + noise * (like.std() if like.numel() > 1 else 1.0)
            return like[examples] if self.has_batch(like) else like

        return Inputs(tuple(map(draw, self.positional)), {name: draw(one) for name, one in self.keywords.items()})
