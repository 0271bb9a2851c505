"""Files that are written atomically, and read safely even if somebody else put them there."""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from esper.errors import RunError

TEMPORARY_SUFFIX = ".partial"


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` (text as UTF-8) in one step that survives a crash or a power cut.

    Raises:
        RunError: the file cannot be written; what was there before is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    with replace_file(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def move_durably(source: Path, path: Path) -> None:
    """Move the file `source` to `path`, on the same file system, in one step that survives a crash.

    Raises:
        RunError: the file cannot be moved; what was there before is untouched.
    """
    with replace_file(path) as temporary:
        with source.open("rb") as file:
            os.fsync(file.fileno())
        source.rename(temporary)


@contextmanager
def replace_file(path: Path) -> Generator[Path]:
    """Context manager of a temporary path beside `path`. What is written there replaces `path` at the end, in one step.

    The caller syncs the content to disk.

    Raises:
        RunError: the file cannot be written; what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    try:
        # A link that somebody planted in the run's directory must not lead the write out of it.
        temporary.unlink(missing_ok=True)
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
    """A path that is no regular file, or a file that is too large."""


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes. It neither waits for a pipe nor reads a device.

    Raises:
        OSError: the file cannot be read; UnsuitableFileError if it is no regular file or larger.
    """
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
