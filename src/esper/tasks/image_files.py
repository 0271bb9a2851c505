"""Fashion-MNIST and CIFAR-10, read from local files, and the suites on them.

Fashion-MNIST: H. Xiao, K. Rasul and R. Vollgraf (arXiv:1708.07747), in IDX files (Y. LeCun, "The MNIST database"): two
zero bytes, the type of the values (8: unsigned bytes), the number of axes, the length of each axis as a big-endian
32-bit integer, and then the values.

CIFAR-10: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), in its binary version: five
files for training and one for test, of records of one byte for the label and 3072 for the red, the green and the blue
plane, each row by row.

Nothing is downloaded, no file is unpickled, and no archive is unpacked to disk.
"""

import gzip
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.numerics.arrays import Ints
from esper.tasks.datasets import CLASSES, DatasetSuite, make_read_only
from esper.tasks.image_suite import FIVE, FULL, SIDE, STAGES, ImageHost, ImageSuite
from esper.tasks.instance import Instance, LabelledArrays
from esper.tasks.suite import Source, find_by_name

Bytes = NDArray[np.uint8]


class ImageSet(NamedTuple):
    """A data set with its published split: images ``[N, C, H, W]`` and labels ``[N]`` for training and for test."""

    images: Bytes
    labels: Ints
    test_images: Bytes
    test_labels: Ints


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/esper``, by default ``~/.cache/esper`` (XDG Base Directory Specification)."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "esper"


# Fashion-MNIST

PACKAGED = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package dataset-fashion-mnist installs the files."""
FASHION_FILES = tuple(
    f"{part}-{content}" for part in ("train", "t10k") for content in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
"""File names: images and labels for training, then for test."""
FASHION_SIDE = 28
MOST_IMAGES = 100_000
"""Largest number of images in a file."""


def find_fashion_mnist() -> tuple[Path, ...] | None:
    """The four files, compressed or not, in the cache or from Debian's package; None if any of them is missing."""
    for folder in (cache_folder() / "fashion-mnist", PACKAGED):
        candidates = [(folder / f"{name}.gz", folder / name) for name in FASHION_FILES]
        files = tuple(path for pair in candidates for path in [path for path in pair if path.is_file()][:1])
        if len(files) == len(FASHION_FILES):
            return files
    return None


def read_fashion_mnist(files: tuple[Path, ...]) -> ImageSet:
    """Read the images ``[N, 1, 28, 28]`` and labels from the four files, given in the order of `FASHION_FILES`."""
    images, labels, test_images, test_labels = (
        read_idx(path, (FASHION_SIDE, FASHION_SIDE) if "images" in path.name else ()) for path in files
    )
    for path, here, there in ((files[1], images, labels), (files[3], test_images, test_labels)):
        if len(here) != len(there) or there.max(initial=0) >= CLASSES:
            raise TaskError(f"{path} does not hold one of {CLASSES} labels for each of {len(here)} images")
    return ImageSet(images[:, None], labels.astype(np.int64), test_images[:, None], test_labels.astype(np.int64))


def read_idx(path: Path, shape: tuple[int, ...]) -> Bytes:
    """Read the bytes ``[N, *shape]`` of an IDX file, which is compressed if its name ends in ``.gz``."""
    axes = 1 + len(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * axes)
            expected = struct.pack(">HBB", 0, 8, axes), struct.pack(f">{len(shape)}I", *shape)
            count = int.from_bytes(header[4:8])
            if (header[:4], header[8:]) != expected or not 0 < count <= MOST_IMAGES:
                sizes = ", ".join(map(str, ("N", *shape)))
                raise TaskError(f"{path} is no IDX file of unsigned bytes [{sizes}]: its header is {header.hex()}")
            size = count * math.prod(shape)
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path} ({error}): put a whole file there, or delete it") from error
    if len(content) != size:
        raise TaskError(f"{path} holds {'more' if len(content) > size else 'fewer'} than {size} bytes: it is damaged")
    return np.frombuffer(content, np.uint8).reshape(count, *shape)


# CIFAR-10

CIFAR_FILES = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "cifar-10-batches-bin/test_batch.bin"
CIFAR_RECORD = 1 + 3 * SIDE * SIDE
CIFAR_MOST = 10_000
"""Largest number of records in a file."""


def locate_cifar10() -> Path:
    """The path of the CIFAR-10 archive in the cache, whether it exists or not."""
    return cache_folder() / "cifar10" / "cifar-10-binary.tar.gz"


def read_cifar10(path: Path) -> ImageSet:
    """Read the images ``[N, 3, 32, 32]`` and labels from the archive, without unpacking it to disk."""
    records: dict[str, Bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                # Links are never followed.
                if member.name not in (*CIFAR_FILES, CIFAR_TEST) or not member.isreg():
                    continue
                if member.size % CIFAR_RECORD or not 0 < member.size <= CIFAR_MOST * CIFAR_RECORD:
                    raise TaskError(
                        f"{member.name} in {path} has {member.size} bytes, not {CIFAR_RECORD} for each of at most "
                        f"{CIFAR_MOST} images: delete the archive"
                    )
                file = archive.extractfile(member)
                assert file is not None
                records[member.name] = np.frombuffer(file.read(), np.uint8).reshape(-1, CIFAR_RECORD)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path} ({error}): delete it, and put a whole one there") from error
    for name in (*CIFAR_FILES, CIFAR_TEST):
        if name not in records:
            raise TaskError(f"{path} lacks {name}: delete it, and put a whole one there")
        if (label := int(records[name][:, 0].max())) >= CLASSES:
            raise TaskError(f"CIFAR-10 has a label {label}, there are {CLASSES} classes: the archive is damaged")
    (images, labels), (test_images, test_labels) = (
        (part[:, 1:].reshape(-1, 3, SIDE, SIDE), part[:, 0].astype(np.int64))
        for part in (np.concatenate([records[name] for name in CIFAR_FILES]), records[CIFAR_TEST])
    )
    return ImageSet(images, labels, test_images, test_labels)


# Suites


@cache
def _flatten_images(read: Callable[[Any], ImageSet], place: Any) -> LabelledArrays:
    """All training examples, then the test examples that suites use: ``[N, C * SIDE * SIDE]``, framed in black."""
    data = read(place)
    images = np.concatenate([data.images, data.test_images[: ImageSuite.test_size]])
    frame = (SIDE - images.shape[-1]) // 2
    images = np.pad(images, ((0, 0), (0, 0), (frame, frame), (frame, frame))).reshape(len(images), -1)
    labels = np.concatenate([data.labels, data.test_labels[: ImageSuite.test_size]])
    return make_read_only(images, labels)


class PhotoSuite(DatasetSuite):
    """A suite on a data set in files, with the hosts of `ImageSuite`; a variant is the host's number of stages."""

    sites = ImageSuite.sites
    blueprints = ImageSuite.blueprints
    steps = ImageSuite.steps
    batches_per_step = ImageSuite.batches_per_step
    batch_size = ImageSuite.batch_size
    validation_size = ImageSuite.validation_size
    test_size = ImageSuite.test_size
    optimizer = ImageSuite.optimizer
    learning_rates = ImageSuite.learning_rates
    train_sizes = (512, 1024, 2048)
    scarce_train_size = 256
    host_widths = (FULL,)

    def list_widths(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(STAGES, FULL)

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> ImageHost:
        """The host with all stages."""
        return ImageHost(self.input_shape[0], widths, self.classes, FIVE, generator)

    def host(self, instance: Instance) -> ImageHost:
        self.check(instance)
        stages = find_by_name(f"variant of suite '{self.name}'", instance.variant, STAGES)
        generator = torch.Generator().manual_seed(instance.seed)
        return ImageHost(self.input_shape[0], instance.widths, self.classes, stages, generator)


class FashionMnistSuite(PhotoSuite):
    """Fashion-MNIST: grey images of clothes."""

    name = "fashion_mnist"
    input_shape = (1, SIDE, SIDE)

    def __init__(self) -> None:
        files = find_fashion_mnist()
        if files is None:
            raise TaskError(
                f"suite {self.name!r} reads Fashion-MNIST, which is neither in {cache_folder() / 'fashion-mnist'} nor "
                f"in {PACKAGED}: put the four IDX files {', '.join(FASHION_FILES)} there, compressed or not, or "
                "install Debian's package dataset-fashion-mnist"
            )
        self.source = Source("read from the files of Fashion-MNIST", files[0])
        self.dataset = partial(_flatten_images, read_fashion_mnist, files)


class Cifar10Suite(PhotoSuite):
    """CIFAR-10: coloured photographs."""

    name = "cifar10"
    input_shape = (3, SIDE, SIDE)

    def __init__(self) -> None:
        path = locate_cifar10()
        if not path.is_file():
            raise TaskError(
                f"suite {self.name!r} reads CIFAR-10, which is not at {path}: put that archive there, the binary "
                "version of https://www.cs.toronto.edu/~kriz/cifar.html"
            )
        self.source = Source("read from the archive of CIFAR-10", path)
        self.dataset = partial(_flatten_images, read_cifar10, path)
