"""A model as a graph that `torch.export` makes of it, for batches of any size or of one."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export import export as trace

from esper.errors import ExportError
from esper.growth.export.inputs import Inputs
from esper.growth.fossil_graph import TRACING_ERRORS


def traced(model: nn.Module, inputs: Inputs, *, fixed_batch: bool = False) -> ExportedProgram:
    """The graph of ``model``, which is in eval mode, with a batch of at least two as example unless it is fixed.

    Raises:
        ExportError: `torch.export` cannot make one, or none that holds for other batch sizes.
    """
    try:
        return _traced(model, inputs, fixed_batch)
    except TRACING_ERRORS as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if not fixed_batch and _is_traceable(model, inputs):
            raise ExportError(
                f"torch.export cannot trace {type(model).__name__} for batches of any size ({reason}): export it for "
                "batches as large as the example input, with fixed_batch=True (or --fixed-batch), or rewrite what it "
                "stumbles on"
            ) from error
        raise ExportError(
            f"torch.export cannot trace {type(model).__name__} ({reason}): rewrite what it stumbles on, export its "
            "weights alone as safetensors, or keep the finalized module itself by torch.save"
        ) from error


def _is_traceable(model: nn.Module, inputs: Inputs) -> bool:
    """Whether it can be traced for batches of one size."""
    try:
        _traced(model, inputs, fixed_batch=True)
    except TRACING_ERRORS:
        return False
    return True


def _traced(model: nn.Module, inputs: Inputs, fixed_batch: bool) -> ExportedProgram:
    axes = None
    if not fixed_batch:
        given = inspect.signature(model.forward).bind(*inputs.positional, **inputs.keywords).arguments
        axes = {name: _dynamic(argument, inputs) for name, argument in given.items()}
    # Copies, as torch marks the very tensors that it was to take for dynamic.
    keywords = {name: one.clone() for name, one in inputs.keywords.items()}
    return trace(model, tuple(one.clone() for one in inputs.positional), keywords, dynamic_shapes=axes)


def _dynamic(argument: Any, inputs: Inputs) -> Any:
    """Which axes vary, in the same structure as the argument; ``*args`` is a tuple and ``**kwargs`` a dictionary."""
    if isinstance(argument, Tensor):
        return {0: Dim.DYNAMIC} if inputs.has_batch(argument) else None
    if isinstance(argument, tuple):
        return tuple(_dynamic(one, inputs) for one in cast("tuple[Any, ...]", argument))
    return {name: _dynamic(one, inputs) for name, one in argument.items()}
