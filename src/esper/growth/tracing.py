"""A model as a graph for batches of any size or of one, from tensors alone to tensors alone."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export import export as trace

from esper.errors import ExportError
from esper.growth.fossils import TRACING_ERRORS
from esper.growth.probe import Arguments
from esper.growth.reloading import collect_tensors


def trace_model(model: nn.Module, inputs: Inputs, *, fixed_batch: bool = False) -> ExportedProgram:
    """The graph of ``model``, which is in eval mode, with a batch of at least two as example unless it is fixed.

    Raises:
        ExportError: `torch.export` cannot make one, or none that holds for other batch sizes.
    """
    axes = None
    if not fixed_batch:
        arguments = inspect.signature(model.forward).bind(*inputs.positional, **inputs.keywords).arguments
        axes = {name: _choose_dynamic(argument, inputs) for name, argument in arguments.items()}
    # Copies, as torch marks the very tensors that it was to take for dynamic.
    positional = tuple(one.clone() for one in inputs.positional)
    keywords = {name: one.clone() for name, one in inputs.keywords.items()}
    try:
        return trace(model, positional, keywords, dynamic_shapes=axes)
    except TRACING_ERRORS as error:
        name, reason = type(model).__name__, str(error).strip().partition("\n")[0] or type(error).__name__
        if not fixed_batch:
            try:
                trace_model(model, inputs, fixed_batch=True)
            except ExportError:
                pass  # the reason below holds for any batch
            else:
                raise ExportError(
                    f"torch.export cannot trace {name} for batches of any size ({reason}): export it for batches as "
                    "large as the example input, with fixed_batch=True (or --fixed-batch), or rewrite what it "
                    "stumbles on"
                ) from error
        raise ExportError(
            f"torch.export cannot trace {name} ({reason}): rewrite what it stumbles on, export its weights alone as "
            "safetensors, or keep the finalized module itself by torch.save"
        ) from error


def _choose_dynamic(argument: Any, inputs: Inputs) -> Any:
    """Which axes vary, in the same structure as the argument; ``*args`` is a tuple and ``**kwargs`` a dictionary."""
    if isinstance(argument, Tensor):
        return {0: Dim.DYNAMIC} if inputs.has_batch(argument) else None
    if isinstance(argument, tuple):
        return tuple(_choose_dynamic(one, inputs) for one in cast("tuple[Any, ...]", argument))
    return {name: _choose_dynamic(one, inputs) for name, one in argument.items()}


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
        positional: tuple[Any, ...] = (arguments,) if isinstance(arguments, Tensor) else ()
        keywords: dict[str, Any] = {}
        if isinstance(arguments, tuple):
            positional = arguments
        elif isinstance(arguments, Mapping):
            keywords = dict(arguments)
        values = [*positional, *keywords.values()]
        for value in values:
            if not isinstance(value, Tensor):
                raise ExportError(
                    f"the example input holds a {type(value).__name__}, but an exported model takes tensors only: "
                    "wrap the model in a module that fills in the rest"
                )
        if not values or values[0].dim() == 0:
            raise ExportError("the example input needs a first tensor whose first axis is the batch")
        empty = [tuple(one.shape) for one in values if not one.numel()]
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

    def draw(self, batch: int, generator: torch.Generator) -> Inputs:
        """Random ones of another batch size.

        Floating-point ones are normal, as large as these. Others, and those with infinities, may be indices and masks
        that belong together: of them come examples of these, and what has no batch stays as it is.
        """
        examples = torch.randint(self.batch, (batch,), generator=generator)

        def draw_like(like: Tensor) -> Tensor:
            if like.is_floating_point() and like.isfinite().all():
                shape = (batch, *like.shape[1:]) if self.has_batch(like) else like.shape
                noise = torch.randn(shape, generator=generator).to(like.dtype)
                return like.mean() + noise * (like.std() if like.numel() > 1 else 1.0)
            return like[examples] if self.has_batch(like) else like

        return Inputs(
            tuple(map(draw_like, self.positional)), {name: draw_like(one) for name, one in self.keywords.items()}
        )


def make_plain(returned: Any) -> Any:
    """What a model returns with mappings and dataclasses as dictionaries, sequences as tuples or lists.

    What holds no tensor is left out, for instance the cache that a language model returns beside its logits, which is
    an object of its own.

    Raises:
        ExportError: no tensor is left.
    """
    plain = _plain(returned)
    if not collect_tensors(plain):
        raise ExportError(
            f"the model returns a {type(returned).__name__} in which no tensor is found: wrap the model in a module "
            "that returns a tensor, or a tuple, list, mapping or dataclass of tensors"
        )
    return plain


def _plain(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part
    if dataclasses.is_dataclass(part) and not isinstance(part, Mapping | type):
        part = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    if isinstance(part, Mapping):
        named = {name: _plain(one) for name, one in cast("Mapping[Any, Any]", part).items()}
        return {name: one for name, one in named.items() if one is not None} or None
    if isinstance(part, Sequence) and not isinstance(part, str | bytes):
        parts = [one for one in map(_plain, cast("Sequence[Any]", part)) if one is not None]
        return (tuple(parts) if isinstance(part, tuple) else parts) or None
    return None
