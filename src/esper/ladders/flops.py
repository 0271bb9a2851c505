"""The training cost of a ladder in FLOPs, counted pass by pass on a plain model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from esper.engine.budget import TRAINING_PASSES
from esper.growth.example_input import Arguments, call_host, find_input_place, first_tensor, fit_example
from esper.growth.taps import find_tensors
from esper.numerics.flops import count_flops


def count_forward(model: nn.Module, example: Arguments) -> tuple[float, str]:
    """FLOPs of a forward pass for the whole example input, and a note on operations that torch cannot count.

    The note is empty if everything is counted.
    """
    like = next(model.parameters())
    counted = count_flops(model, lambda: call_host(model, fit_example(model, example, like)))
    return float(counted.total), counted.uncounted


class TrainingFlops:
    """Counts the FLOPs of a model's training passes in the same way as `esper.Spending`.

    The cost of a forward pass is that of the example input, scaled by the size of the input. A backward pass costs
    twice as much. Passes under `torch.no_grad`, such as those of validation, are not counted.

    Args:
        model: The model whose passes are counted within `counting`.
        example: Arguments of the model.
        flops: FLOPs spent before.
    """

    def __init__(self, model: nn.Module, example: Arguments, flops: float = 0.0) -> None:
        self.flops = flops
        """FLOPs spent so far."""
        self.forward = 0.0
        """FLOPs of a forward pass of the current model for the example input."""
        self._model, self._place = model, find_input_place(example)
        self._size = first_tensor(example).numel()
        self._pass = 0.0

    @contextmanager
    def counting(self) -> Generator[None]:
        """Context manager in which all passes through the whole model are counted."""
        hooks = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        places: dict[int | str, Any] = {**dict(enumerate(arguments)), **keywords}
        tensors = {place: value for place, value in places.items() if isinstance(value, Tensor)}
        inputs = tensors.get(self._place, next(iter(tensors.values()), None))
        if inputs is not None:
            self._pass = self.forward * inputs.numel() / self._size
            self.flops += self._pass

    def _end(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # The backward pass is counted when it happens.
        backward, self._pass = self._pass * (TRAINING_PASSES - 1), 0.0
        outputs = [tensor for tensor in find_tensors(output) if tensor.grad_fn is not None]
        if outputs:
            register_multi_grad_hook(outputs, lambda _: self._add(backward), mode="any")

    def _add(self, flops: float) -> None:
        self.flops += flops
