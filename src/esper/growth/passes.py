"""Forward passes that are under way in any thread, and switches of what grows, which wait until they have ended.

One thread may call a model while another switches its growth off, plants a seed or measures the model without one. Each
pass must be that of one network: so a switch waits for the passes of other threads, and their next passes for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from esper.errors import SlotError
from esper.growth.positions import PositionHints

PATIENCE = 60.0
"""Seconds that a switch waits for passes of other threads."""


@dataclass
class RunningPass:
    """What one thread is computing: calls of the model, the host or a slot, which may be nested."""

    calls: int = 0
    """Calls of the model and of slots."""
    in_host: bool = False
    """Whether the host is computing. A thread that was interrupted within the host is not, after its next call."""
    inputs: Tensor | None = None
    """The network's input."""
    hints: PositionHints | None = None
    """Masks and caches among the host's arguments."""
    sources: dict[Hashable, Tensor] = field(default_factory=dict[Hashable, Tensor])
    """Inputs of layers that make hidden units, by the hook that keeps each."""


class PassGate:
    """Counts the forward passes of one model by threads, and changes its structure between them.

    Passes of several threads run side by side. A thread that changes something within a pass of its own changes the
    rest of this pass, too. Copies begin without passes. Compiled passes do not count: a graph reads all modules and
    weights at its start.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._passes: dict[threading.Thread, RunningPass] = {}
        self._holder: threading.Thread | None = None
        """The thread that switches, or waits for passes to do so."""
        self._levels = 0
        """Nested calls of `exclusive` in this thread."""
        self._switches = 0
        """Nested calls of `switching` in this thread; new passes of others wait while there are any."""
        self._blocks: dict[Hashable, tuple[ExitStack, int]] = {}
        """Contexts of `share` by key, with the number of blocks that hold them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PassGate, ()

    @property
    def running(self) -> RunningPass | None:
        """The pass of this thread, if one is under way."""
        return self._passes.get(threading.current_thread())

    @contextmanager
    def passing(self) -> Generator[None]:
        """Within the block a pass of this thread is under way."""
        present = self._enter()
        present.calls, in_host = present.calls + 1, present.in_host
        try:
            yield
        finally:
            present.calls, present.in_host = present.calls - 1, in_host
            self._leave(present)

    def begin_host(self) -> RunningPass:
        """Called when the host is called, whether by the model or not."""
        present = self._enter()
        present.in_host = True
        return present

    def end_host(self) -> None:
        """Called when the host returns, or raises an exception."""
        present = self.running
        if present is not None:
            present.in_host = False
            self._leave(present)

    def _enter(self) -> RunningPass:
        """The pass of this thread; a new one begins as soon as no other thread switches."""
        # Without the lock within a pass, which no other thread can begin or end.
        present = self.running
        if present is None:
            with self._condition:
                thread = threading.current_thread()
                self._condition.wait_for(lambda: not self._switches or self._holder is thread)
                present = self._passes[thread] = RunningPass()
        return present

    def _leave(self, present: RunningPass) -> None:
        """Drop the pass of this thread, unless a call of it goes on."""
        if not present.calls and not present.in_host:
            with self._condition:
                self._passes.pop(threading.current_thread(), None)
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Within the block no other thread is in such a block. It may be nested."""
        with self._condition:
            thread = threading.current_thread()
            # Whoever waits here does not go on with its pass, so that others need not wait for it.
            paused = self._passes.pop(thread, None)
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._holder in (None, thread))
            self._holder = thread
            self._levels += 1
            if paused is not None:
                self._passes[thread] = paused
        try:
            yield
        finally:
            with self._condition:
                self._levels -= 1
                if not self._levels:
                    self._holder = None
                    self._condition.notify_all()

    @contextmanager
    def switching(self, *, must: bool = False) -> Generator[None]:
        """Within the block no pass of another thread is under way. It may be nested, but not hold for long.

        Args:
            must: Whether to go on if passes do not end, as where a change is undone.

        Raises:
            SlotError: a pass of another thread has not ended after `PATIENCE` seconds.
        """

        def ended() -> bool:
            return not any(other is not self._holder and other.is_alive() for other in self._passes)

        with self.exclusive():
            with self._condition:
                self._switches += 1
            try:
                with self._condition:
                    if not self._condition.wait_for(ended, PATIENCE) and not must:
                        raise SlotError(
                            f"a forward pass of this model in another thread has not ended for {PATIENCE:g} seconds: "
                            "growth cannot be switched, planted or removed meanwhile; let that thread finish first"
                        )
                yield
            finally:
                with self._condition:
                    self._switches -= 1
                    self._condition.notify_all()

    @contextmanager
    def between_passes(self, context: AbstractContextManager[Any]) -> Generator[None]:
        """A ``context`` that is entered and left while no other thread is in a pass."""
        with ExitStack() as stack:
            with self.switching():
                stack.enter_context(context)
            try:
                yield
            finally:
                with self.switching(must=True):
                    stack.close()

    @contextmanager
    def share(self, key: Hashable, make_context: Callable[[], AbstractContextManager[Any]]) -> Generator[None]:
        """Let several blocks hold one context at once, nested or in other threads.

        The first block enters it, and the last one to end leaves it, both between passes.
        """
        with self.exclusive():
            stack, blocks = self._blocks.get(key) or (ExitStack(), 0)
            if not blocks:
                with self.switching():
                    stack.enter_context(make_context())
            self._blocks[key] = stack, blocks + 1
        try:
            yield
        finally:
            with self.exclusive():
                stack, blocks = self._blocks.pop(key)
                if blocks > 1:
                    self._blocks[key] = stack, blocks - 1
                else:
                    with self.switching(must=True):
                        stack.close()
