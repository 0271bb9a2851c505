"""How often a growing model was compiled: torch compiles a function a few times only, and then runs it uncompiled.

`torch.compile` makes a graph of every structure, to learn and to evaluate, and keeps them all, until
`torch.compiler.reset` drops them. Nothing public tells how many it keeps. So a model counts, whenever it is compiled,
and what was dropped since shows in a function that is compiled for that alone: it is compiled anew then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

GRAPHS = 8
"""As many graphs of one function as torch keeps unless it is told otherwise."""


class Compilations:
    """The graphs of one model; all its slots tell it of changes. Copies of the model begin with none."""

    def __init__(self) -> None:
        # No decorator: it loads torch's compiler, which making an optimizer does anyway and importing Esper need not.
        torch.compiler.assume_constant_result(Compilations.record_graph)
        torch.compiler.assume_constant_result(Compilations.count_trace)
        self.traced = 0
        """How often a slot was made part of a graph."""
        self.uncompiled = 0
        """How often a slot ran without being part of one."""
        self._graphs: set[tuple[int, bool, bool]] = set()
        """By structure, counted from 0, training mode, and whether there were gradients; since they were dropped."""
        self._structure = 0
        self._drops: int | None = None
        """How often graphs had been dropped when the structure changed last."""
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Compilations, ()

    @property
    def compiled(self) -> bool:
        """Whether there is any."""
        return bool(self._graphs)

    def count_trace(self) -> None:
        """Called once for each graph that a slot is part of, while it is made."""
        self.traced += 1

    def record_graph(self, training: bool) -> None:
        """Called once for each graph, while it is made."""
        self._graphs.add((self._structure, training, torch.is_grad_enabled()))

    def record_change(self) -> None:
        """The structure is another one now; warns once, if torch will not compile it."""
        if self._warned or not self._graphs:
            return
        drops = _drops.count()
        if self._drops not in (None, drops):
            self._graphs.clear()  # some may have come after that: better too few than a warning without a cause
        self._drops = drops
        self._structure += 1
        if len(self._graphs) >= GRAPHS:
            self._warned = True
            warnings.warn(
                f"the growing model was compiled {len(self._graphs)} times for the structures that it had, and beyond "
                f"{GRAPHS} graphs torch runs it uncompiled unless told otherwise: drop the graphs of former structures "
                "after each change, as by `if decision.changes: torch.compiler.reset()`",
                stacklevel=3,
            )


class _Drops:
    """Counts how often all graphs were dropped: a function of its own is compiled anew then."""

    def __init__(self) -> None:
        self._compiled: Callable[[Tensor], Tensor] | None = None
        self._seen = 0

    @torch.no_grad()
    def count(self) -> int:
        """So far, as far as anybody asked; more where the modes of torch are others than before."""
        if self._compiled is None:
            self._compiled = torch.compile(_negative, backend=self._make)
        self._compiled(torch.zeros(()))
        return self._seen

    def _make(self, graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        self._seen += 1
        return graph.forward


def _negative(number: Tensor) -> Tensor:
    return -number


_drops = _Drops()
