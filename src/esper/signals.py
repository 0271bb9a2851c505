"""Ctrl-C and SIGTERM as exceptions, so that files are closed, and between steps instead of within one."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Self

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """SIGTERM arrived. Unless it is caught, the process exits with 143, the shells' code for it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def build_exception(number: int) -> BaseException:
    """The exception that a signal which ends the process raises."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def raise_terminated() -> Generator[None]:
    """While active, SIGTERM raises Terminated. Signals arrive in the main thread; elsewhere this does nothing."""

    def handle(number: int, _: FrameType | None) -> None:
        raise build_exception(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Interrupts:
    """Context manager in which the first Ctrl-C or SIGTERM only sets `requested`; a second one stops immediately.

    Stopping is a KeyboardInterrupt or, for SIGTERM, a Terminated. Use it in the main thread, where signals arrive.
    Signals that the process ignores, as workers do, stay ignored.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        """Number of the signal that arrived last."""
        self._interruptible = False

    def __enter__(self) -> Self:
        # Signals that are ignored stay ignored.
        numbers = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def raise_if_requested(self) -> None:
        """Stop if a signal has arrived."""
        if self.requested is not None:
            raise build_exception(self.requested)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Context manager around work that may stop anywhere: a first or an earlier signal stops it immediately."""
        self._interruptible = True
        try:
            self.raise_if_requested()
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        repeated = self.requested is not None
        self.requested = number
        if repeated or self._interruptible:
            raise build_exception(number)
