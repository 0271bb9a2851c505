"""A lock that one process holds, and that vanishes with it however it ends."""

import errno
import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from esper.errors import RunError

_TRIES = 5
_RETRY_SECONDS = 0.02
"""Whoever only looks whether a lock is held has it for less than that."""


@contextmanager
def hold(path: Path, what: str) -> Generator[None]:
    """Hold the lock on the file at `path`, which says that `what` is running.

    The file stays: deleting it would let two processes lock two files of one name.

    Raises:
        RunError: another process holds it, it cannot be written, or the file system has no locks.
    """
    folder = path.parent
    try:
        # Not inherited: Python opens files such that no process it starts gets them.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(f"cannot write in {folder} ({error.strerror}): make it writable, or work on a copy") from error
    try:
        try:
            if not _take(descriptor):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                raise RunError(f"run {folder} is in use by {holder}: wait until it ends, or stop it")
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"`{what}` (process {os.getpid()})".encode())
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise RunError(f"cannot write in {folder} ({error.strerror}): free some space") from error
            advice = "move the run to a file system that has locks"
            raise RunError(f"cannot lock {folder} ({error.strerror}): {advice}") from error
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on the file at `path`; False where that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that whoever looks hinders no other who looks; filelock's lock is an exclusive `flock`.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int) -> bool:
    """Whether an open file could be locked; closing it, or the end of the process, gives the lock back."""
    for left in reversed(range(_TRIES)):
        if lock_descriptor(descriptor, blocking=False):
            return True
        if left:
            time.sleep(_RETRY_SECONDS)
    return False
