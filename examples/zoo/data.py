"""The data sets of the examples, each read from one place and split once for all.

Digits come with scikit-learn, MNIST-1D is computed from its recipe. Fashion-MNIST: H. Xiao, K. Rasul and R. Vollgraf
(arXiv:1708.07747), in IDX files, the format of MNIST (Y. LeCun, "The MNIST database"): two zero bytes, the type of the
values (8: unsigned bytes), the number of axes, the length of each as a big-endian 32-bit integer, then bytes. CIFAR-10
in its binary version: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009); its archive holds
five files for training and one for test, a record is the label, a byte, and 3072 pixels: the red plane, the green and
the blue one, each row by row. charlm is any UTF-8 text, by default that of Python's own help.

No file is unpickled and no archive unpacked. What is downloaded is checked by its hash and appears in the cache whole.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import struct
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.errors import TaskError
from esper.tasks.datasets import digits, mnist1d
from esper.tasks.texts import read_text

TASKS = {
    "digits": ("conv", "mlp", "resnet", "vit"),
    "mnist1d": ("conv1d", "mlp"),
    "fashion-mnist": ("resnet", "conv", "vit", "mlp"),
    "cifar10": ("resnet", "conv", "vit"),
    "charlm": ("gpt",),
}
"""The tasks, each with the hosts that can read it, the first one by default."""
CLASSES = 10
"""Of all tasks but charlm."""
CLOTHES = 60_000, 10_000
"""Images of Fashion-MNIST for training and for test."""
PACKAGED = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
FASHION_ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
FASHION_MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""Of the compressed files, as the authors state them: against damage, not against forgery."""
CIFAR_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR_FILES = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "cifar-10-batches-bin/test_batch.bin"
CIFAR_PER_FILE, CIFAR_RECORD = 10_000, 1 + 3 * 32 * 32
WINDOW = 64
"""Characters that a language model sees."""
TEXT_VALIDATION, TEXT_TEST = 0.05, 0.1
"""Shares of the text, from its end."""
MEASURED = 10_000
"""Training examples that mean and deviation are taken from."""

Bytes = NDArray[np.uint8]


class Minibatch(NamedTuple):
    """What a host reads, and the classes it is to find."""

    inputs: Tensor
    """``[B, ...]``."""
    targets: Tensor
    """int64 ``[B]``, or ``[B, T]`` for every position of a sequence."""


@dataclass(frozen=True)
class Labelled:
    """N examples of one label each: inputs of any type ``[N, ...]``, which batches hold as float32, standardised."""

    inputs: Tensor
    labels: Tensor
    """int64 ``[N]``."""
    mean: float
    deviation: float

    def __len__(self) -> int:
        return len(self.labels)

    def epoch(self, size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """Minibatches of exactly ``size`` examples in random order; one of all examples if there are fewer."""
        order = torch.from_numpy(rng.permutation(len(self))).to(self.labels.device)
        for begin in _starts(len(self), size):
            yield self._batch(order[begin : begin + size])

    def in_order(self, size: int) -> Iterator[Minibatch]:
        """All examples once, always the same, at most ``size`` at a time."""
        for begin in range(0, len(self), size):
            yield self._batch(slice(begin, begin + size))

    def to(self, device: torch.device | str) -> Labelled:
        """The same examples on ``device``."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))

    def _batch(self, chosen: Tensor | slice) -> Minibatch:
        inputs = self.inputs[chosen].to(torch.float32)
        return Minibatch((inputs - self.mean) / self.deviation, self.labels[chosen])


@dataclass(frozen=True)
class Windows:
    """Stretches of a text: at each of ``length`` positions the next token is to be found.

    Raises:
        TaskError: the text is too short for a single window.
    """

    tokens: NDArray[np.unsignedinteger[Any]]
    """``[N]``."""
    length: int
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise TaskError(
                f"a part of the text has {len(self.tokens)} characters, which is less than a window of "
                f"{self.length} and what follows it: give a longer text"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def epoch(self, size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """Windows that begin anywhere, as many as would cover the text once."""
        starts = rng.integers(len(self.tokens) - self.length, size=len(self))
        for begin in _starts(len(self), size):
            yield self._batch(starts[begin : begin + size])

    def in_order(self, size: int) -> Iterator[Minibatch]:
        """One window after the other, without overlap; what does not fill the last one is left out."""
        starts = np.arange(len(self)) * self.length
        for begin in range(0, len(self), size):
            yield self._batch(starts[begin : begin + size])

    def to(self, device: torch.device | str) -> Windows:
        """The text stays where it is; each batch is moved."""
        return replace(self, device=device)

    def _batch(self, starts: NDArray[np.int64]) -> Minibatch:
        places = starts[:, None] + np.arange(self.length + 1)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64)).to(self.device)
        return Minibatch(windows[:, :-1], windows[:, 1:])


def _starts(count: int, size: int) -> range:
    """Where minibatches of ``size`` begin, the last one whole unless it is the only one."""
    return range(0, max(count - size, 0) + 1, size)


class Splits(NamedTuple):
    """Disjoint parts of one data set, the same in every run."""

    train: Labelled | Windows
    """What hosts learn from."""
    validation: Labelled | Windows
    """What growth is decided by."""
    test: Labelled | Windows
    """Read once, at the end."""
    classes: int
    """How many a host has to choose from."""

    def to(self, device: torch.device | str) -> Splits:
        """The same, on ``device``."""
        return Splits(self.train.to(device), self.validation.to(device), self.test.to(device), self.classes)


def load(task: str, *, download: bool = False, text: Path | None = None) -> Splits:
    """The data of a task; ``download``: fetch what is missing; ``text``: what charlm learns instead of Python's help.

    Raises:
        TaskError: there is no such task, or its data are nowhere to be found, or damaged; it says what helps.
    """
    if text is not None and task != "charlm":
        raise TaskError(f"task {task} reads no text of yours: leave text out, or choose charlm")
    match task:
        case "digits":
            return split_last_rows(*digits(), (1, 8, 8), test=360, validation=300)
        case "mnist1d":
            return split_last_rows(*mnist1d(), (1, 40), test=1000, validation=500)
        case "fashion-mnist":
            return load_fashion_mnist(download)
        case "cifar10":
            return load_cifar10(download)
        case "charlm":
            return load_text(text)
        case _:
            raise TaskError(f"no task is called {task!r}: choose from {', '.join(TASKS)}")


def split_last_rows(
    inputs: NDArray[Any], labels: NDArray[np.int64], shape: tuple[int, ...], test: int, validation: int
) -> Splits:
    """The last ``test`` rows are for test: those of digits come from other writers."""
    inputs, pool = inputs.reshape(-1, *shape), len(labels) - test
    return split_examples((inputs[:pool], labels[:pool]), (inputs[pool:], labels[pool:]), validation)


def split_examples(
    pool: tuple[NDArray[Any], NDArray[np.int64]], test: tuple[NDArray[Any], NDArray[np.int64]], validation: int
) -> Splits:
    """``validation`` random examples of ``pool`` are for decisions, the others for training; the same in every run."""
    inputs, labels = pool
    order = np.random.default_rng(0).permutation(len(labels))
    held, learned = np.sort(order[:validation]), np.sort(order[validation:])
    sample = inputs[learned[:MEASURED]].astype(np.float32)
    mean, deviation = float(sample.mean()), float(sample.std())
    parts = (inputs[learned], labels[learned]), (inputs[held], labels[held]), test
    return Splits(*(Labelled(torch.tensor(x), torch.tensor(y), mean, deviation) for x, y in parts), classes=CLASSES)


# Fashion-MNIST


def load_fashion_mnist(download: bool, sizes: tuple[int, int] = CLOTHES, validation: int = 5000) -> Splits:
    """From its four IDX files, compressed or not, in the cache or where Debian's package puts them."""
    cached = cache_folder() / "fashion-mnist"
    folder = next((place for place in (cached, PACKAGED) if all(_find(place, name) for name in FASHION_MD5)), None)
    if folder is None and not download:
        raise TaskError(
            f"Fashion-MNIST is neither in {cached} nor in {PACKAGED}: add --download, install Debian's package "
            "dataset-fashion-mnist, or put the four IDX files there"
        )
    if folder is None:
        folder = cached
        for name, md5 in FASHION_MD5.items():
            fetch(f"{FASHION_ADDRESS}/{name}.gz", md5, folder / f"{name}.gz", most_bytes=40_000_000)
    parts: list[tuple[Bytes, NDArray[np.int64]]] = []
    for prefix, count in zip(("train", "t10k"), sizes, strict=True):
        images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"), (count, 28, 28))
        labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"), (count,))
        parts.append((images[:, None], labels.astype(np.int64)))
    return split_examples(parts[0], parts[1], validation)


def _find(folder: Path, name: str) -> Path | None:
    """The file, compressed or not."""
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def read_idx(path: Path | None, shape: tuple[int, ...]) -> Bytes:
    """The array ``shape`` in a file, which is compressed if its name ends in ``.gz``.

    Raises:
        TaskError: it cannot be read, or is no IDX file of unsigned bytes of that shape.
    """
    assert path is not None
    expected, size = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape), math.prod(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header, content = file.read(len(expected)), file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path} ({error}): put a whole file there, or delete it") from error
    if header != expected:
        raise TaskError(f"{path} is no IDX file of unsigned bytes of shape {shape}: its header is {header.hex()}")
    if len(content) != size:
        raise TaskError(f"{path} holds {'more' if len(content) > size else 'fewer'} than {size} bytes: it is damaged")
    return np.frombuffer(content, np.uint8).reshape(shape)


# CIFAR-10


def load_cifar10(
    download: bool, md5: str = CIFAR_MD5, per_file: int = CIFAR_PER_FILE, validation: int = 5000
) -> Splits:
    """From the archive in the cache, which is never unpacked to a disk."""
    path = cache_folder() / "cifar10" / "cifar-10-binary.tar.gz"
    if path.is_file():
        with path.open("rb") as file:
            if hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() != md5:
                raise TaskError(f"{path} is damaged or another file (its md5 is not {md5}): delete it")
    elif download:
        fetch(CIFAR_ADDRESS, md5, path, most_bytes=200_000_000)
    else:
        raise TaskError(f"CIFAR-10 is not at {path}: add --download, or put {CIFAR_ADDRESS} there")
    records: dict[str, Bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                # Links are not followed, whatever they point to.
                if member.name not in (*CIFAR_FILES, CIFAR_TEST) or not member.isreg():
                    continue
                if member.size != per_file * CIFAR_RECORD:
                    raise TaskError(
                        f"{member.name} in {path} has {member.size} bytes, not {per_file * CIFAR_RECORD}: delete the "
                        "archive"
                    )
                file = archive.extractfile(member)
                assert file is not None
                records[member.name] = np.frombuffer(file.read(), np.uint8).reshape(per_file, CIFAR_RECORD)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {path} ({error}): delete it, and fetch it with --download") from error
    for name in (*CIFAR_FILES, CIFAR_TEST):
        if name not in records:
            raise TaskError(f"{path} lacks {name}: delete it, and fetch it with --download")
        if (label := int(records[name][:, 0].max())) >= CLASSES:
            raise TaskError(f"CIFAR-10 has a label {label}, there are {CLASSES} classes: the archive is damaged")
    parts = np.concatenate([records[name] for name in CIFAR_FILES]), records[CIFAR_TEST]
    pool, test = ((part[:, 1:].reshape(-1, 3, 32, 32), part[:, 0].astype(np.int64)) for part in parts)
    return split_examples(pool, test, validation)


# Text


def load_text(path: Path | None) -> Splits:
    """A text as indices into its own alphabet, one per character, split by position.

    Raises:
        TaskError: it cannot be read, is not UTF-8, or is too short.
    """
    try:
        text = read_text("help") if path is None else path.read_bytes().decode()
    except OSError as error:
        raise TaskError(f"cannot read the text {path} ({error.strerror}): give a readable file") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"the text {path} is not UTF-8: convert it first") from error
    alphabet, indices = np.unique(np.frombuffer(text.encode("utf-32-le"), "<u4"), return_inverse=True)
    if len(alphabet) < 2:
        raise TaskError(f"{path} has {len(alphabet)} different characters, which leaves nothing to learn")
    tokens = indices.astype(np.min_scalar_type(len(alphabet) - 1))
    parts = np.split(
        tokens, [round(len(tokens) * (1 - TEXT_TEST - TEXT_VALIDATION)), round(len(tokens) * (1 - TEXT_TEST))]
    )
    return Splits(*(Windows(part, WINDOW) for part in parts), classes=len(alphabet))


# The cache


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/esper``, by default ``~/.cache/esper`` (XDG Base Directory Specification)."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "esper"


def fetch(url: str, md5: str, path: Path, *, most_bytes: int) -> None:
    """Download a file to ``path``, where it appears in one step once it has proved right.

    Raises:
        TaskError: it cannot be had or written, or is not what it should be; nothing is left behind.
    """
    partial, digest, size = path.with_name(f".{path.name}.partial"), hashlib.md5(usedforsecurity=False), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # a link that lay there would lead the write elsewhere
        with urllib.request.urlopen(url, timeout=30) as response, partial.open("xb") as file:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                if (size := size + len(chunk)) > most_bytes:
                    raise TaskError(f"{url} gave more than {most_bytes} bytes: it is another file")
                file.write(chunk)
            if digest.hexdigest() != md5:
                raise TaskError(f"{url} gave something else, its md5 is not {md5}: try again later")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise TaskError(f"cannot download {url} to {path} ({error}): try again, or put the file there") from error
    finally:
        partial.unlink(missing_ok=True)
