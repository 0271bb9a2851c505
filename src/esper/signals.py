"""Ctrl-C and SIGTERM, as exceptions, so that whatever is open gets closed, and between steps instead of within one."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """SIGTERM came; unless caught, the process ends with the exit code that shells give to it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def stop(number: int) -> BaseException:
    """What a signal that asks for the end of the process raises."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def raise_terminated() -> Generator[None]:
    """While active, SIGTERM raises Terminated. Signals arrive in the main thread; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise stop(number)


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

    def raise_if_requested(self) -> None:
        """Stop if that was requested."""
        if self.requested is not None:
            raise stop(self.requested)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """A region that may be abandoned anywhere: here the first signal stops at once, as does one from before."""
        self._at_once = True
        try:
            self.raise_if_requested()
            yield
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.requested is not None
        self.requested = number
        if again or self._at_once:
            raise stop(number)
