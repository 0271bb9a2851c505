"""Activation checkpointing of frozen parts of a host, and of copies of blocks.

Hugging Face models checkpoint their blocks only in training mode, and frozen parts stay in evaluation mode. So in a
training forward pass, frozen blocks are checkpointed here, without dropout, by the function that
``gradient_checkpointing_enable`` has set. A block that is recomputed in the backward pass must not get a cache of keys
and values, because it would fill the cache twice. So frozen parts create no cache, as in training mode.

Attributes and classes are found by their names in Hugging Face models, as in `esper.growth.depth`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from esper.errors import SlotError
from esper.growth.positions import find_hints, list_argument_names
from esper.growth.taps import list_named_modules

if TYPE_CHECKING:
    from esper.growth.frozen import FrozenParts

_LAYER = "GradientCheckpointingLayer"
"""Class of the blocks that checkpoint themselves."""
_MODEL = "PreTrainedModel"
"""Class of the models whose blocks checkpoint only in training mode."""
_ENABLED = "gradient_checkpointing"
"""Attribute of blocks and of their models: whether to checkpoint."""
_FUNCTION = "_gradient_checkpointing_func"
"""Attribute of both: `torch.utils.checkpoint.checkpoint` with options."""
_USE_CACHE = "use_cache"
"""Argument of models: whether to create a cache."""
_FORWARD = "forward"


class FrozenCheckpointing:
    """Checkpoints frozen blocks while the host runs a training forward pass.

    The pass lasts from `begin`, a forward pre-hook of the host, to `end`, a forward hook that is always called. In
    compiled code nothing is checkpointed.

    Args:
        mode: A module that is in training mode whenever the growing model is.
        frozen: Frozen parts of the host.
    """

    def __init__(self, mode: nn.Module, frozen: FrozenParts) -> None:
        self._mode, self._frozen = mode, frozen
        self._replaced: list[_ReplacedForward] = []
        self._warned = False

    def begin(self, host: nn.Module, _: tuple[Any, ...]) -> None:
        """Replace the ``forward`` of frozen blocks and models that checkpoint, if a backward pass may follow."""
        if torch.compiler.is_compiling():
            return
        self.end()  # after a pass that another hook broke off
        if not (self._mode.training and torch.is_grad_enabled()):
            return
        # Those in training mode checkpoint by themselves.
        enabled = [part for part in self._frozen.modules if is_checkpointed(part) and not part.training]
        for part in enabled:
            if _has_class(part, _LAYER):
                self._replaced.append(_CheckpointedForward(part))
            elif _USE_CACHE in list_argument_names(part):
                self._replaced.append(_UncachedForward(part))
        # Models of other libraries or versions may have other ways.
        without_layers = [
            part
            for part in enabled
            if _has_class(part, _MODEL) and not any(_has_class(inner, _LAYER) for _, inner in list_named_modules(part))
        ]
        if without_layers and not self._warned:
            self._warned = True
            warnings.warn(
                f"gradient checkpointing saves no memory in the frozen {type(without_layers[0]).__name__}: its class "
                "checkpoints in training mode alone, and frozen parts stay in evaluation mode",
                stacklevel=2,
            )

    def end(self, *_: Any) -> None:
        """Restore the ``forward`` of all modules."""
        while self._replaced:
            self._replaced.pop().restore()


def is_checkpointed(module: nn.Module) -> bool:
    """Whether gradient checkpointing is enabled for a block, or for the blocks of a model."""
    return vars(module).get(_ENABLED) is True and _FUNCTION in vars(module)


def refuse_cache(module: nn.Module, names: tuple[str, ...], arguments: tuple[Any, ...]) -> None:
    """Reject a checkpointed call with a cache; ``names`` are the names of the positional arguments of ``module``.

    Raises:
        SlotError: one of the arguments is a cache.
    """
    for name in find_hints(names, arguments, {}).caches:
        raise SlotError(
            f"a {type(module).__name__} with gradient checkpointing got a cache, {name!r}, which the recomputation in "
            "the backward pass would fill twice: call the model with use_cache=False and without a cache, or disable "
            "its gradient checkpointing"
        )


def _has_class(module: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(module).__mro__)


class _ReplacedForward:
    """Replaces a module's ``forward`` until `restore`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = list_argument_names(module)
        self._forward: Callable[..., Any] = module.forward
        self._before = vars(module).get(_FORWARD)
        """A ``forward`` set on the instance, for instance by another library."""
        setattr(module, _FORWARD, self)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the module's ``forward``."""
        if vars(self._module).get(_FORWARD) is self:
            delattr(self._module, _FORWARD)
            if self._before is not None:
                setattr(self._module, _FORWARD, self._before)


class _CheckpointedForward(_ReplacedForward):
    """Keeps only the arguments of a block, and recomputes the block in the backward pass."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        names = (*self._names[: len(arguments)], *keywords)
        refuse_cache(self._module, names, (*arguments, *keywords.values()))
        compute = functools.partial(self._forward, **keywords)
        # Reentrant checkpointing gives gradients only if an argument requires one; the other variant always does.
        if any(isinstance(argument, Tensor) and argument.requires_grad for argument in arguments):
            return vars(self._module)[_FUNCTION](compute, *arguments)
        return cast("Any", checkpoint(compute, *arguments, use_reentrant=False))


class _UncachedForward(_ReplacedForward):
    """Calls a model so that it creates no cache."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        place = self._names.index(_USE_CACHE)
        if place < len(arguments):
            return self._forward(*arguments[:place], False, *arguments[place + 1 :], **keywords)
        return self._forward(*arguments, **{**keywords, _USE_CACHE: False})
