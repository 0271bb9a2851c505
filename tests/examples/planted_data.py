"""Small data sets in the true formats of the large ones."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FASHION_SIDE = 28
CIFAR_RECORD = 3073


def idx(array: NDArray[np.uint8]) -> bytes:
    """An IDX file: zeros, type, number of axes, their lengths, then bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_fashion_mnist(folder: Path, training: int, test: int, *, compressed: bool) -> dict[str, NDArray[np.uint8]]:
    """The four files; returns their arrays by name."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    arrays: dict[str, NDArray[np.uint8]] = {}
    for prefix, count in (("train", training), ("t10k", test)):
        shape = (count, FASHION_SIDE, FASHION_SIDE)
        arrays[f"{prefix}-images-idx3-ubyte"] = rng.integers(256, size=shape, dtype=np.uint8)
        arrays[f"{prefix}-labels-idx1-ubyte"] = rng.integers(10, size=count, dtype=np.uint8)
    for name, array in arrays.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


def cifar_records(count: int, seed: int) -> NDArray[np.uint8]:
    """``[count, CIFAR_RECORD]``: a label and random pixels."""
    rng = np.random.default_rng(seed)
    records = rng.integers(256, size=(count, CIFAR_RECORD), dtype=np.uint8)
    records[:, 0] = rng.integers(10, size=count)
    return records


def write_tar(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> None:
    """A compressed archive of files, and of symbolic links to their targets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
