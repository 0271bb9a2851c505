"""Writing files atomically, and reading files safely even if they come from somebody else."""

import errno
import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from esper.errors import RunError

TEMPORARY_SUFFIX = ".partial"
LOCK_FILE = ".lock"
"""The file that is locked in a folder of a file system that locks no folders, such as NFS."""
LONGEST_WAIT = 600.0
"""Seconds to wait for another process's lock; that process may be suspended."""
_POLL_SECONDS = 0.01


_locked = threading.local()
"""Has ``folders``: those that this thread has locked, by device and inode."""


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Context manager within which no other thread or process writes into ``folder`` by the functions of this module.

    Contexts may be nested. On a file system without locks, no lock is taken.
    """
    descriptors: list[int] = []
    try:
        try:
            descriptors.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            status = os.fstat(descriptors[0])
            identity = (status.st_dev, status.st_ino)
            locked: set[tuple[int, int]] = vars(_locked).setdefault("folders", set())
            outermost = identity not in locked
            if outermost:
                try:
                    _wait_for_lock(descriptors[0], folder)
                except OSError:
                    # Network file systems lock only what is open for writing, which a folder cannot be.
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                    descriptors.append(os.open(folder / LOCK_FILE, flags, 0o666))
                    with suppress(OSError):
                        _wait_for_lock(descriptors[1], folder)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"cannot write in {folder} ({reason}): choose a writable folder") from error
        if not outermost:
            yield
            return
        locked.add(identity)
        try:
            yield
        finally:
            locked.remove(identity)
            # Closing is not enough if a process was forked meanwhile, which has the same descriptor.
            with suppress(OSError):
                fcntl.flock(descriptors[-1], fcntl.LOCK_UN)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for_lock(descriptor: int, folder: Path) -> None:
    """Lock an open folder or file; OSError if its file system has no such locks."""
    end = time.monotonic() + LONGEST_WAIT
    while not lock_descriptor(descriptor, blocking=False):
        if time.monotonic() > end:
            raise RunError(
                f"cannot write in {folder}: another process has been writing there for {LONGEST_WAIT / 60:.0f} "
                "minutes; stop it, or choose another folder"
            )
        time.sleep(_POLL_SECONDS)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` (text as UTF-8) in one step that survives a crash or a power cut.

    Writers of one folder take turns; `lock_folder` keeps others out for longer.
    """
    data = content.encode() if isinstance(content, str) else content
    with replace_file(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def move_durably(source: Path, path: Path) -> None:
    """Move the file `source` to `path`, on the same file system, in one step that survives a crash."""
    with replace_file(path) as temporary:
        with source.open("rb") as file:
            os.fsync(file.fileno())
        source.rename(temporary)


@contextmanager
def replace_file(path: Path) -> Generator[Path]:
    """Context manager of a temporary path beside `path`, of which what is there at the end replaces `path` in one step.

    The caller syncs the content to disk.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    with lock_folder(path.parent):
        try:
            # A link that somebody planted in the run's directory must not lead the write out of it.
            try:
                temporary.unlink(missing_ok=True)
            except ValueError as error:
                raise RunError(f"cannot write {path} ({error}): choose another name") from error
            try:
                yield temporary
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            # The rename is durable once the folder is synced, too.
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunError(f"cannot write {path} ({reason}): free some space or choose a writable folder") from error


class UnsuitableFileError(OSError):
    """A path that is not a regular file, or a file that is too large."""


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes. It neither waits for a pipe nor reads a device."""
    # Opened without blocking, and then checked: a check before would be about another file if it is replaced meanwhile.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, str(error)) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsuitableFileError(errno.EINVAL, "it is not a regular file")
        if status.st_size > most:
            raise UnsuitableFileError(errno.EFBIG, f"it is larger than {most} bytes")
        data = file.read(status.st_size + 1)
        if len(data) != status.st_size:
            raise UnsuitableFileError(errno.EINVAL, "its size is not the one that the system reports")
        return data


def print_line(line: str) -> None:
    """Print at once, also where the output is a file."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"{line}\n".encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def parse_json(text: bytes) -> Any:
    """Parse JSON."""

    def build_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("a key is given twice")
        return values

    try:
        return json.loads(text, object_pairs_hook=build_mapping)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
