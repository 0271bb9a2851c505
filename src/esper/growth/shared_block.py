"""Changes for the time of a block, that several blocks may want at once: one within another, or in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Owner = TypeVar("Owner")

_LOCK = threading.RLock()


def share(change: Callable[[Owner], AbstractContextManager[Any]]) -> Callable[[Owner], AbstractContextManager[None]]:
    """Let what the first block changes of its owner be restored by the last one, whichever ends first."""
    entered: WeakKeyDictionary[Owner, tuple[ExitStack, int]] = WeakKeyDictionary()

    @contextmanager
    @wraps(change)
    def block(owner: Owner) -> Generator[None]:
        with _LOCK:
            stack, blocks = entered.get(owner) or (ExitStack(), 0)
            if not blocks:
                stack.enter_context(change(owner))
            entered[owner] = stack, blocks + 1
        try:
            yield
        finally:
            with _LOCK:
                stack, blocks = entered.pop(owner)
                if blocks > 1:
                    entered[owner] = stack, blocks - 1
                else:
                    stack.close()

    return block
