"""IDX files, the format of MNIST: a big-endian header, then bytes (Y. LeCun, "The MNIST database").

The header is two zero bytes, the type of the values (8: unsigned bytes), the number of axes, and the length of each
axis as 32-bit integers.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.errors import TaskError

UNSIGNED_BYTES = 8
COMPRESSED = ".gz"


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array ``shape`` in a file, which is compressed if its name ends in ``.gz``.

    Raises:
        TaskError: it cannot be read, or is no IDX file of unsigned bytes of that shape.
    """
    try:
        with _opened(path) as file:
            return _array(file, path, shape)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path} ({error}): put a whole file there, or delete it") from error


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path) if path.suffix == COMPRESSED else path.open("rb")


def _array(file: gzip.GzipFile | BufferedReader, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    expected = struct.pack(f">HBB{len(shape)}I", 0, UNSIGNED_BYTES, len(shape), *shape)
    header = file.read(len(expected))
    if header != expected:
        raise TaskError(f"{path} is no IDX file of unsigned bytes of shape {shape}: its header is {header.hex()}")
    size = math.prod(shape)
    content = file.read(size + 1)
    if len(content) != size:
        raise TaskError(f"{path} holds {'more' if len(content) > size else 'fewer'} than {size} bytes: it is damaged")
    return np.frombuffer(content, np.uint8).reshape(shape)
