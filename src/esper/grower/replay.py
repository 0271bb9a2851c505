"""Run a network again from one of its slots on: what came before that slot answers from a record.

Whatever a submodule returned before a slot was entered cannot depend on the seed there, so it need not be computed
again when that seed has another weight. Only calls of submodules are spared; what happens between them happens again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from esper.growth.slot import Slot

Forward = Callable[..., Any]
Handler = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""What happens instead of a forward: gets the module, its own forward, and the arguments."""


class StrayedError(Exception):
    """The network did not call the submodules that it called before."""


@dataclass
class _Call:
    module: nn.Module
    output: Any = None
    """Before hooks, which run again."""
    end: int | None = None
    """Number of the first call after it and all within it; None while it is under way."""


class Trace:
    """The calls of one forward pass in the order in which they began, up to the last of ``slots``.

    Calls within a call that is over are forgotten, unless one of ``slots`` is among them.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.calls: list[_Call] = []
        self.places: dict[nn.Module, int] = {}
        """Numbers of the calls of ``slots`` that there have been."""
        self._awaited: set[nn.Module] = set(slots)

    def record(self, module: nn.Module, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A `Handler` that computes, and remembers."""
        if not self._awaited:
            return plain(*arguments, **keywords)
        number, call = len(self.calls), _Call(module)
        self.calls.append(call)
        if module in self._awaited:
            self._awaited.discard(module)
            self.places[module] = number
        known = len(self.places)
        output = plain(*arguments, **keywords)
        if len(self.places) == known:
            del self.calls[number + 1 :]
        if self._awaited:
            call.output, call.end = output, len(self.calls)
        return output


class Replay:
    """Another pass on the same inputs, in which all is as in ``trace`` until ``slot`` is entered."""

    def __init__(self, trace: Trace, slot: Slot) -> None:
        self._calls = trace.calls
        self._until = trace.places[slot]
        self._next: int | None = 0
        """Number of the call to come; None once the slot was entered."""

    @property
    def complete(self) -> bool:
        """Whether the slot was entered."""
        return self._next is None

    def answer(self, module: nn.Module, plain: Forward, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A `Handler` that computes what it must only.

        Raises:
            StrayedError: it is another module's turn.
        """
        if self._next is None:
            return plain(*arguments, **keywords)
        call = self._calls[self._next] if self._next < len(self._calls) else None
        if call is None or call.module is not module:
            raise StrayedError
        if self._next == self._until:
            self._next = None
        elif call.end is not None and call.end <= self._until:
            self._next = call.end
            return call.output
        else:
            self._next += 1
        return plain(*arguments, **keywords)


class _Stand:
    """Stands for a module's forward."""

    def __init__(self, module: nn.Module, handler: Handler, spoil: Callable[[str], None]) -> None:
        self._module, self._plain = module, module.forward
        self._handler, self._spoil = handler, spoil

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            self._spoil("the network is compiled")
            return self._plain(*arguments, **keywords)
        return self._handler(self._module, self._plain, arguments, keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the module get the forward of their own.
        self._spoil("the network is copied while it is measured")
        return _itself, (self._plain,)


def _itself(forward: Forward) -> Forward:
    return forward


@contextmanager
def handled(modules: Iterable[nn.Module], handler: Handler, spoil: Callable[[str], None]) -> Generator[None]:
    """Within the block ``handler`` is asked instead of the forwards of ``modules``; their hooks run as ever.

    ``spoil`` is told if one of them is compiled or copied, which has the forward of its own all the same.
    """
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module, _ in before:
            vars(module)["forward"] = _Stand(module, handler, spoil)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward
