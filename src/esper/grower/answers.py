"""Whether what a model says depends on what it is asked.

A network that gives the same answer to everything has learned nothing but how frequent answers are. Where one class is
more frequent than the others its accuracy exceeds ``1 / classes`` all the same, and its loss is below that of guessing
evenly: figures alone do not show that it is dead, but its outputs do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from esper.grower.values import IncomparableError, flattened
from esper.growth.model import GrowingModel

T = TypeVar("T")

ROUNDING = 2 * torch.finfo(torch.float32).eps
"""Relative difference of what is computed of equal rows in one minibatch."""


class Answers:
    """Listens to a model's calls until one of its answers depends on the example."""

    def __init__(self) -> None:
        self._varied = self._heard = False

    @property
    def blind(self) -> bool:
        """Whether examples that differ were all answered alike, in every minibatch; False where that is not known."""
        return self._heard and not self._varied

    @contextmanager
    def of(self, model: GrowingModel) -> Generator[None]:
        """Listen within the block."""
        handle = model.register_forward_hook(self._hear, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def first_of(self, evaluate: Callable[[GrowingModel], T]) -> Callable[[GrowingModel], T]:
        """``evaluate``, to whose first call this listens."""
        calls = 0

        def listened(model: GrowingModel) -> T:
            nonlocal calls
            calls += 1
            if calls > 1:
                return evaluate(model)
            with self.of(model):
                return evaluate(model)

        return listened

    @torch.no_grad()
    def _hear(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if self._varied or torch.compiler.is_compiling():
            return
        try:
            asked, said = _rows((arguments, keywords)), _rows(output)
        except IncomparableError:
            self._varied = True  # as far as anybody can tell
            return
        said = [rows for rows in said if rows.is_floating_point()]
        if said and any(_differ(rows) for rows in asked):
            self._heard = True
            self._varied = any(_differ(rows) for rows in said)


def _rows(value: Any) -> list[Tensor]:
    """The tensors in ``value`` that may hold several examples, ``[N, ...]``."""
    leaves = [leaf for leaf in flattened(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.dim() > 0 and len(leaf) > 1 and leaf.numel() and not leaf.is_complex()]


def _differ(rows: Tensor) -> bool:
    """Whether the examples are not all the same."""
    first = rows[:1]
    if not rows.is_floating_point():
        return bool((rows != first).any())
    return not bool(torch.isclose(rows, first, rtol=ROUNDING, atol=0.0).all())
