"""CIFAR-10 in its binary version: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).

The archive holds five files for training and one for test. A record is the label, a byte, and 3072 pixels: the red
plane, the green and the blue one, each row by row.
"""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.tasks.practice.cache import cache_folder
from esper.tasks.practice.download import Remote, fetch, md5_of
from esper.tasks.practice.examples import Splits
from esper.tasks.practice.images import split
from esper.tasks.practice.task import Access

CLASSES = 10
CHANNELS, SIDE = 3, 32
RECORD = 1 + CHANNELS * SIDE * SIDE
PER_FILE = 10_000
VALIDATION = 5000
ARCHIVE = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 200_000_000
)
INSIDE = "cifar-10-batches-bin"
TRAINING_FILES = tuple(f"{INSIDE}/data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = f"{INSIDE}/test_batch.bin"


class Cifar10:
    """60,000 images ``[3, 32, 32]`` of ten kinds of things. The official test part is for test."""

    name = "cifar10"
    hosts = ("resnet", "conv", "vit")
    reads_text = False

    def __init__(self, archive: Remote = ARCHIVE, per_file: int = PER_FILE, validation: int = VALIDATION) -> None:
        self._archive = archive
        self._per_file = per_file
        self._validation = validation

    def load(self, access: Access) -> Splits:
        """From the archive in the cache, which is never unpacked to a disk."""
        records = self._records(self._found(access))
        training = np.concatenate([records[name] for name in TRAINING_FILES])
        return split(_parts(training), _parts(records[TEST_FILE]), self._validation, CLASSES)

    def _found(self, access: Access) -> Path:
        path = cache_folder() / self.name / "cifar-10-binary.tar.gz"
        if not path.is_file():
            if not access.download:
                raise TaskError(f"CIFAR-10 is not at {path}: add --download, or put {self._archive.url} there")
            fetch(self._archive, path)
        elif md5_of(path) != self._archive.md5:
            raise TaskError(f"{path} is damaged or another file (its md5 is not {self._archive.md5}): delete it")
        return path

    def _records(self, path: Path) -> dict[str, NDArray[np.uint8]]:
        """The records ``[N, RECORD]`` of every file, by its name in the archive."""
        wanted = {*TRAINING_FILES, TEST_FILE}
        found: dict[str, NDArray[np.uint8]] = {}
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    if member.name in wanted and member.isreg():
                        found[member.name] = self._array(archive, member, path)
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise TaskError(f"cannot read {path} ({error}): delete it, and fetch it with --download") from error
        missing = sorted(wanted - found.keys())
        if missing:
            raise TaskError(f"{path} lacks {missing[0]}: delete it, and fetch it with --download")
        return found

    def _array(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> NDArray[np.uint8]:
        expected = self._per_file * RECORD
        if member.size != expected:
            raise TaskError(f"{member.name} in {path} has {member.size} bytes, not {expected}: delete the archive")
        file = archive.extractfile(member)
        assert file is not None
        return np.frombuffer(file.read(), np.uint8).reshape(self._per_file, RECORD)


def _parts(records: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images ``[N, 3, 32, 32]`` and labels ``[N]``."""
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise TaskError(f"CIFAR-10 has a label {labels.max()}, there are {CLASSES} classes: the archive is damaged")
    return records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), labels
