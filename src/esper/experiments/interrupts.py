"""Ctrl-C and SIGTERM between steps, not in the middle of one."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from esper.signals import stop

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While active, the first Ctrl-C or SIGTERM only sets `requested`; a second one stops at once.

    Stopping is a KeyboardInterrupt or, for SIGTERM, a Terminated. Use it in the main thread, where signals arrive. A
    process that ignores one of them, as workers do, goes on ignoring it.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        """The signal that came last."""
        self._at_once = False

    def __enter__(self) -> Self:
        heeded = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Stop if that was requested."""
        if self.requested is not None:
            raise stop(self.requested)

    @contextmanager
    def at_once(self) -> Generator[None]:
        """A region that may be abandoned anywhere: here the first signal stops at once, as does one from before."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.requested is not None
        self.requested = number
        if again or self._at_once:
            raise stop(number)
