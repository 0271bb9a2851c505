"""The data sets of images and signals, each read from one place and split once for all.

Digits and MNIST-1D come from `esper.tasks.datasets`. Fashion-MNIST: H. Xiao, K. Rasul and R. Vollgraf
(arXiv:1708.07747), in IDX files, the format of MNIST (Y. LeCun, "The MNIST database"): two zero bytes, the type of the
values (8: unsigned bytes), the number of axes, the length of each as a big-endian 32-bit integer, then bytes. CIFAR-10
in its binary version: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009); its archive holds
five files for training and one for test, a record is the label, a byte, and 3072 pixels: the red plane, the green and
the blue one, each row by row.
"""

from __future__ import annotations

import gzip
import math
import struct
import tarfile
import zlib
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.numerics.arrays import Ints
from esper.tasks.data import LabelledArrays
from esper.tasks.dataset_suites import DigitsSuite, Mnist1dSuite
from esper.tasks.datasets import CLASSES, LENGTH, digits, mnist1d
from esper.tasks.practice.download import Remote, cache_folder, fetch, md5_of
from esper.tasks.practice.examples import Splits, split_examples
from esper.tasks.practice.registry import DataAccess


class Digits:
    """1797 images ``[1, 8, 8]``, shipped with scikit-learn; the test part comes from other writers."""

    name = "digits"
    hosts = ("conv", "mlp", "resnet", "vit")
    reads_text = False

    def load(self, access: DataAccess) -> Splits:
        """The last rows are for test."""
        del access
        return _split_last_rows(digits(), (1, 8, 8), DigitsSuite.test_size, validation=300)


class Mnist1d:
    """5000 signals ``[1, 40]``, computed from their recipe."""

    name = "mnist1d"
    hosts = ("conv1d", "mlp")
    reads_text = False

    def load(self, access: DataAccess) -> Splits:
        """The last rows are for test."""
        del access
        return _split_last_rows(mnist1d(), (1, LENGTH), Mnist1dSuite.test_size, validation=500)


def _split_last_rows(found: LabelledArrays, shape: tuple[int, ...], test: int, validation: int) -> Splits:
    inputs, pool = found.inputs.reshape(-1, *shape), len(found.labels) - test
    return split_examples(
        (inputs[:pool], found.labels[:pool]), (inputs[pool:], found.labels[pool:]), validation, CLASSES
    )


UNSIGNED_BYTES = 8
COMPRESSED = ".gz"


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array ``shape`` in a file, which is compressed if its name ends in ``.gz``.

    Raises:
        TaskError: it cannot be read, or is no IDX file of unsigned bytes of that shape.
    """
    try:
        with _open(path) as file:
            return _read_array(file, path, shape)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path} ({error}): put a whole file there, or delete it") from error


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path) if path.suffix == COMPRESSED else path.open("rb")


def _read_array(file: gzip.GzipFile | BufferedReader, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    expected = struct.pack(f">HBB{len(shape)}I", 0, UNSIGNED_BYTES, len(shape), *shape)
    header = file.read(len(expected))
    if header != expected:
        raise TaskError(f"{path} is no IDX file of unsigned bytes of shape {shape}: its header is {header.hex()}")
    size = math.prod(shape)
    content = file.read(size + 1)
    if len(content) != size:
        raise TaskError(f"{path} holds {'more' if len(content) > size else 'fewer'} than {size} bytes: it is damaged")
    return np.frombuffer(content, np.uint8).reshape(shape)


CLOTHES_SIDE = 28
CLOTHES = 60_000, 10_000
"""Images for training and for test."""
VALIDATION = 5000
"""Training examples of Fashion-MNIST, and of CIFAR-10, that the controller is told about."""
PACKAGED = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
MOST_BYTES = 40_000_000

MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""Of the compressed files, as the authors state them."""


class FashionMnist:
    """70,000 images ``[1, 28, 28]`` of clothes; ten kinds. The official test part is for test."""

    name = "fashion-mnist"
    hosts = ("resnet", "conv", "vit", "mlp")
    reads_text = False

    def __init__(self, sizes: tuple[int, int] = CLOTHES, validation: int = VALIDATION) -> None:
        self._sizes: dict[str, int] = dict(zip(("train", "t10k"), sizes, strict=True))
        self._validation = validation

    def load(self, access: DataAccess) -> Splits:
        """From the four IDX files, compressed or not, in the cache or where Debian's package puts them."""
        folder = self._folder(access)
        train, test = (self._part(folder, prefix) for prefix in self._sizes)
        return split_examples(train, test, self._validation, CLASSES)

    def _folder(self, access: DataAccess) -> Path:
        own = cache_folder() / self.name
        places = (own, PACKAGED)
        found = next((place for place in places if all(_find(place, name) for name in MD5)), None)
        if found is not None:
            return found
        if not access.download:
            raise TaskError(_explain_missing(places))
        for name, md5 in MD5.items():
            fetch(Remote(f"{ADDRESS}/{name}{COMPRESSED}", md5, MOST_BYTES), own / f"{name}{COMPRESSED}")
        return own

    def _part(self, folder: Path, prefix: str) -> tuple[NDArray[np.uint8], Ints]:
        count = self._sizes[prefix]
        images = read_idx(_require(folder, f"{prefix}-images-idx3-ubyte"), (count, CLOTHES_SIDE, CLOTHES_SIDE))
        labels = read_idx(_require(folder, f"{prefix}-labels-idx1-ubyte"), (count,))
        return images[:, None], labels.astype(np.int64)


def _find(folder: Path, name: str) -> Path | None:
    """The file, compressed or not."""
    candidates = (folder / f"{name}{COMPRESSED}", folder / name)
    return next((path for path in candidates if path.is_file()), None)


def _require(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        raise TaskError(f"{folder / name} has vanished: start again")
    return path


def _explain_missing(places: Sequence[Path]) -> str:
    return (
        f"Fashion-MNIST is neither in {' nor in '.join(map(str, places))}: add --download, "
        "install Debian's package dataset-fashion-mnist, or put the four IDX files there"
    )


CHANNELS, SIDE = 3, 32
RECORD = 1 + CHANNELS * SIDE * SIDE
PER_FILE = 10_000
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

    def load(self, access: DataAccess) -> Splits:
        """From the archive in the cache, which is never unpacked to a disk."""
        records = self._read_records(self._locate(access))
        training = np.concatenate([records[name] for name in TRAINING_FILES])
        return split_examples(_split_records(training), _split_records(records[TEST_FILE]), self._validation, CLASSES)

    def _locate(self, access: DataAccess) -> Path:
        path = cache_folder() / self.name / "cifar-10-binary.tar.gz"
        if not path.is_file():
            if not access.download:
                raise TaskError(f"CIFAR-10 is not at {path}: add --download, or put {self._archive.url} there")
            fetch(self._archive, path)
        elif md5_of(path) != self._archive.md5:
            raise TaskError(f"{path} is damaged or another file (its md5 is not {self._archive.md5}): delete it")
        return path

    def _read_records(self, path: Path) -> dict[str, NDArray[np.uint8]]:
        """The records ``[N, RECORD]`` of every file, by its name in the archive."""
        wanted = {*TRAINING_FILES, TEST_FILE}
        found: dict[str, NDArray[np.uint8]] = {}
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    if member.name in wanted and member.isreg():
                        found[member.name] = self._read_member(archive, member, path)
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise TaskError(f"cannot read {path} ({error}): delete it, and fetch it with --download") from error
        missing = sorted(wanted - found.keys())
        if missing:
            raise TaskError(f"{path} lacks {missing[0]}: delete it, and fetch it with --download")
        return found

    def _read_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> NDArray[np.uint8]:
        expected = self._per_file * RECORD
        if member.size != expected:
            raise TaskError(f"{member.name} in {path} has {member.size} bytes, not {expected}: delete the archive")
        file = archive.extractfile(member)
        assert file is not None
        return np.frombuffer(file.read(), np.uint8).reshape(self._per_file, RECORD)


def _split_records(records: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Ints]:
    """Images ``[N, 3, 32, 32]`` and labels ``[N]``."""
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise TaskError(f"CIFAR-10 has a label {labels.max()}, there are {CLASSES} classes: the archive is damaged")
    return records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE), labels
