"""A lock that one process holds, and that vanishes with it however it ends."""

import errno
import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from esper.errors import RunError

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
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
            _take(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"`{what}` (process {os.getpid()})".encode())
        except OSError as error:
            raise RunError(_refusal(error, folder, descriptor)) from error
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
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int) -> None:
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _HELD or not left:
                raise
            time.sleep(_RETRY_SECONDS)


def _refusal(error: OSError, folder: Path, descriptor: int) -> str:
    if error.errno in _HELD:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        return f"run {folder} is in use by {holder}: wait until it ends, or stop it"
    if error.errno == errno.ENOSPC:
        return f"cannot write in {folder} ({error.strerror}): free some space"
    return f"cannot lock {folder} ({error.strerror}): move the run to a file system that has locks"
