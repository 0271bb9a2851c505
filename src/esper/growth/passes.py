"""Running forward passes of all threads, and changes of a model's growth, which wait until these passes have ended.

One thread may call a model while another switches its growth off, plants a seed or measures the model without one. A
pass must compute a single network. So a change waits for running passes of other threads, and new passes wait for it.
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
"""Seconds that a change waits for passes of other threads."""


@dataclass
class RunningPass:
    """The running pass of one thread: calls of the model, the host or a slot, which may be nested."""

    calls: int = 0
    """Number of calls of the model and of slots."""
    in_host: bool = False
    """Whether the host is computing. If a thread was interrupted in the host, this is reset at its next call."""
    inputs: Tensor | None = None
    """The network's input."""
    hints: PositionHints | None = None
    """Masks and caches among the host's arguments."""
    sources: dict[Hashable, Tensor] = field(default_factory=dict[Hashable, Tensor])
    """Inputs of layers that compute hidden units, by the hook that records each."""


class PassGate:
    """Counts the forward passes of one model by threads, and changes its structure between them.

    Passes of several threads run side by side. A thread that changes something within its own pass also changes the
    rest of this pass. Copies start without passes. Compiled passes do not count, because a graph reads all modules and
    weights at its start.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._passes: dict[threading.Thread, RunningPass] = {}
        self._holder: threading.Thread | None = None
        """The thread that makes a change, or waits for passes in order to make one."""
        self._levels = 0
        """Number of nested calls of `exclusive` in this thread."""
        self._switches = 0
        """Number of nested calls of `switching` in this thread; if above 0, new passes of other threads wait."""
        self._blocks: dict[Hashable, tuple[ExitStack, int]] = {}
        """Contexts of `share` by key, with the number of their users."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PassGate, ()

    @property
    def running(self) -> RunningPass | None:
        """The pass of this thread, if one is under way."""
        return self._passes.get(threading.current_thread())

    @contextmanager
    def passing(self) -> Generator[None]:
        """Context manager for a pass of this thread."""
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
        """The pass of this thread; a new one starts as soon as no other thread makes a change."""
        # No lock is needed within a pass, because no other thread can start or end it.
        present = self.running
        if present is None:
            with self._condition:
                thread = threading.current_thread()
                self._condition.wait_for(lambda: not self._switches or self._holder is thread)
                present = self._passes[thread] = RunningPass()
        return present

    def _leave(self, present: RunningPass) -> None:
        """Drop the pass of this thread, unless one of its calls is still running."""
        if not present.calls and not present.in_host:
            with self._condition:
                self._passes.pop(threading.current_thread(), None)
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Context manager that only one thread at a time can enter; it may be nested."""
        with self._condition:
            thread = threading.current_thread()
            # A thread that waits here does not continue its pass, so others need not wait for that.
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
        """Context manager in which no pass of another thread is running. It may be nested, but must be short.

        Args:
            must: Whether to continue even if passes do not end, for instance to undo a change.

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
        """Enter and leave a ``context`` while no other thread is in a pass."""
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
        """Context manager by which several users, nested or in other threads, share one context.

        The first user enters the context and the last one leaves it, both between passes.
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
