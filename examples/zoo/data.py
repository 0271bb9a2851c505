"""The data sets of the examples, each read from one place and split once for all.

Digits come with scikit-learn, MNIST-1D is computed from its recipe; Fashion-MNIST and CIFAR-10 are read by
`esper.tasks.image_files`, and can be downloaded here. charlm is any UTF-8 text, by default that of Python's own help.

No file is unpickled and no archive unpacked. What is downloaded is checked by its hash and appears in the cache whole.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.errors import TaskError
from esper.tasks import image_files
from esper.tasks.datasets import digits, mnist1d
from esper.tasks.image_files import cache_folder, find_fashion_mnist, locate_cifar10, read_cifar10, read_fashion_mnist
from esper.tasks.language_suite import read_text

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
WINDOW = 64
"""Characters that a language model sees."""
TEXT_VALIDATION, TEXT_TEST = 0.05, 0.1
"""Shares of the text, from its end."""
MEASURED = 10_000
"""Training examples that mean and deviation are taken from."""


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


def load_fashion_mnist(download: bool, validation: int = 5000) -> Splits:
    """From its four IDX files, compressed or not, in the cache or where Debian's package puts them."""
    folder = cache_folder() / "fashion-mnist"
    if find_fashion_mnist() is None and download:
        for name, md5 in FASHION_MD5.items():
            fetch(f"{FASHION_ADDRESS}/{name}.gz", md5, folder / f"{name}.gz", most_bytes=40_000_000)
    files = find_fashion_mnist()
    if files is None:
        raise TaskError(
            f"Fashion-MNIST is neither in {folder} nor in {image_files.PACKAGED}: add --download, install Debian's "
            "package dataset-fashion-mnist, or put the four IDX files there"
        )
    data = read_fashion_mnist(files)
    return split_examples((data.images, data.labels), (data.test_images, data.test_labels), validation)


# CIFAR-10


def load_cifar10(download: bool, md5: str = CIFAR_MD5, validation: int = 5000) -> Splits:
    """From the archive in the cache, which is never unpacked to a disk."""
    path = locate_cifar10()
    if path.is_file():
        with path.open("rb") as file:
            if hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() != md5:
                raise TaskError(f"{path} is damaged or another file (its md5 is not {md5}): delete it")
    elif download:
        fetch(CIFAR_ADDRESS, md5, path, most_bytes=200_000_000)
    else:
        raise TaskError(f"CIFAR-10 is not at {path}: add --download, or put {CIFAR_ADDRESS} there")
    data = read_cifar10(path)
    return split_examples((data.images, data.labels), (data.test_images, data.test_labels), validation)


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


# Downloads


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
