"""Ctrl-C between steps, not in the middle of one."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """While active, the first Ctrl-C only sets `requested`; a second one interrupts at once.

    Use it in the main thread, where signals arrive.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
