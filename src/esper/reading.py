"""Reading files that anyone may have put there."""

import errno
import os
import stat
from pathlib import Path


class UnsuitableFileError(OSError):
    """Something that is there, but is no file of a bearable size."""


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes; neither waits for a pipe nor drains a device.

    Raises:
        OSError: it cannot be read; UnsuitableFileError if it is something else or larger.
    """
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
            raise UnsuitableFileError(errno.EINVAL, "its size is not what the system says")
        return data
