"""SIGTERM as an exception, so that whatever is open gets closed; Ctrl-C is Python's KeyboardInterrupt already."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Terminated(SystemExit):
    """SIGTERM came; unless caught, the process ends with the exit code that shells give to it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def stop(number: int) -> BaseException:
    """What a signal that asks for the end of the process raises."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def raising_terminated() -> Generator[None]:
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
