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
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.errors import TaskError
from esper.numerics.arrays import Ints
from esper.numerics.modules import initialise
from esper.tasks.datasets import CLASSES, DatasetSuite, make_read_only
from esper.tasks.instance import Instance, LabelledArrays
from esper.tasks.suite import OptimizerSettings, Source, find_by_name

Bytes = NDArray[np.uint8]
SIDE = 32
"""Side of an image, in pixels."""


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


# The host

Stages = tuple[str, ...]
"""The residual stages of a host, in addition to the three that every host has."""
THREE, FOUR, FIVE = (), ("early",), ("early", "late")
STAGES: Mapping[str, Stages] = {"3_stages": THREE, "4_stages": FOUR, "5_stages": FIVE}
"""Residual stages by the name of the variant."""
FULL = (24, 48, 64)


def make_convolution(
    inputs: int, outputs: int, kernel: int, generator: torch.Generator, *, stride: int = 1
) -> nn.Conv2d:
    """A convolution on images ``[B, C, H, W]``, padded by half its kernel unless it cuts the image into patches."""
    padding = 0 if stride == kernel else kernel // 2
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, device="meta")
    initialise(layer, generator)
    return layer


class ResidualStage(nn.Module):
    """``h + W relu(V * h + b)``, where ``V`` is a 3 x 3 convolution to ``inner`` channels; ``W = 0`` at first.

    Without inner channels it is the identity. Padding does not change what it computes: an inner channel with zero
    weights contributes nothing and gets no gradient.
    """

    def __init__(self, width: int, inner: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = inner
        # Torch warns about layers without channels, so the layer is built with at least one.
        self.spread = nn.Conv2d(width, max(inner, 1), 3, padding=1, device="meta")
        self.spread.weight = nn.Parameter(self.spread.weight[:inner])
        initialise(self.spread, generator)
        # As in Fixup (Zhang et al., 2019, arXiv:1901.09321): without normalisation, a branch starts at zero.
        self.merge = nn.Conv2d(max(inner, 1), width, 1, bias=False, device="meta")
        self.merge.weight = nn.Parameter(torch.zeros(width, inner, 1, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not self.inner:
            return features
        return features + self.merge(self.spread(features).relu())


class PhotoHost(nn.Module):
    """Three to five stages and a mean over pixels: images ``[B, C, 32, 32]`` to logits ``[B, classes]``.

    ``patches`` and ``halving`` cut the image into patches of 4 x 4 and then 2 x 2 pixels; ``fusion`` mixes channels.
    The residual stages ``early``, at 8 x 8, and ``late``, at 4 x 4, exist if ``stages`` names them; without them, no
    position depends on anything outside its patch. The sites are after ``early``, ``late`` and ``fusion``.
    """

    def __init__(
        self, colours: int, widths: Sequence[int], classes: int, stages: Stages, generator: torch.Generator
    ) -> None:
        super().__init__()
        first, second, third = widths
        self.patches = nn.Sequential(make_convolution(colours, first, 4, generator, stride=4), nn.ReLU())
        self.early = ResidualStage(first, first // 2 if "early" in stages else 0, generator)
        self.halving = nn.Sequential(make_convolution(first, second, 2, generator, stride=2), nn.ReLU())
        self.late = ResidualStage(second, second // 2 if "late" in stages else 0, generator)
        self.fusion = nn.Sequential(make_convolution(second, third, 1, generator), nn.ReLU())
        self.head = nn.Linear(third, classes, device="meta")
        initialise(self.head, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.late(self.halving(self.early(self.patches(inputs))))
        return self.head(self.fusion(features).mean((-2, -1)))


# Suites


@cache
def _flatten_images(read: Callable[[Any], ImageSet], place: Any) -> LabelledArrays:
    """All training examples, then the test examples that suites use: ``[N, C * SIDE * SIDE]``, framed in black."""
    data = read(place)
    images = np.concatenate([data.images, data.test_images[: PhotoSuite.test_size]])
    frame = (SIDE - images.shape[-1]) // 2
    images = np.pad(images, ((0, 0), (0, 0), (frame, frame), (frame, frame))).reshape(len(images), -1)
    labels = np.concatenate([data.labels, data.test_labels[: PhotoSuite.test_size]])
    return make_read_only(images, labels)


class PhotoSuite(DatasetSuite):
    """A suite on a data set in files, with convolutional hosts; a variant is the host's number of stages."""

    sites = ("early", "late", "fusion")
    blueprints = ("norm", "conv1x1", "depthwise", "conv3x3", "bottleneck", "gate")
    steps = 20
    batches_per_step = 8
    batch_size = 16
    validation_size = 128
    test_size = 384
    optimizer = OptimizerSettings()
    learning_rates = (0.003, 0.008)
    train_sizes = (512, 1024, 2048)
    scarce_train_size = 256
    host_widths = (FULL,)

    def list_widths(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(STAGES, FULL)

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> PhotoHost:
        """The host with all stages."""
        return PhotoHost(self.input_shape[0], widths, self.classes, FIVE, generator)

    def host(self, instance: Instance) -> PhotoHost:
        self.check(instance)
        stages = find_by_name(f"variant of suite '{self.name}'", instance.variant, STAGES)
        generator = torch.Generator().manual_seed(instance.seed)
        return PhotoHost(self.input_shape[0], instance.widths, self.classes, stages, generator)


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
