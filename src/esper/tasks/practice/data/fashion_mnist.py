"""Fashion-MNIST: H. Xiao, K. Rasul and R. Vollgraf (arXiv:1708.07747)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.tasks.practice.cache import cache_folder
from esper.tasks.practice.download import Remote, fetch
from esper.tasks.practice.examples import Splits
from esper.tasks.practice.idx import COMPRESSED, read_idx
from esper.tasks.practice.images import split
from esper.tasks.practice.task import Access

CLASSES = 10
SIDE = 28
TRAINING, TEST = 60_000, 10_000
VALIDATION = 5000
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

    def __init__(self, training: int = TRAINING, test: int = TEST, validation: int = VALIDATION) -> None:
        self._sizes = {"train": training, "t10k": test}
        self._validation = validation

    def load(self, access: Access) -> Splits:
        """From the four IDX files, compressed or not, in the cache or where Debian's package puts them."""
        folder = self._folder(access)
        train, test = (self._part(folder, prefix) for prefix in self._sizes)
        return split(train, test, self._validation, CLASSES)

    def _folder(self, access: Access) -> Path:
        own = cache_folder() / self.name
        places = (own, PACKAGED)
        found = next((place for place in places if all(_path(place, name) for name in MD5)), None)
        if found is not None:
            return found
        if not access.download:
            raise TaskError(_missing(places))
        for name, md5 in MD5.items():
            fetch(Remote(f"{ADDRESS}/{name}{COMPRESSED}", md5, MOST_BYTES), own / f"{name}{COMPRESSED}")
        return own

    def _part(self, folder: Path, prefix: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        count = self._sizes[prefix]
        images = read_idx(_present(folder, f"{prefix}-images-idx3-ubyte"), (count, SIDE, SIDE))
        labels = read_idx(_present(folder, f"{prefix}-labels-idx1-ubyte"), (count,))
        return images[:, None], labels.astype(np.int64)


def _path(folder: Path, name: str) -> Path | None:
    """The file, compressed or not."""
    candidates = (folder / f"{name}{COMPRESSED}", folder / name)
    return next((path for path in candidates if path.is_file()), None)


def _present(folder: Path, name: str) -> Path:
    path = _path(folder, name)
    if path is None:
        raise TaskError(f"{folder / name} has vanished: start again")
    return path


def _missing(places: Sequence[Path]) -> str:
    return (
        f"Fashion-MNIST is neither in {' nor in '.join(map(str, places))}: add --download, "
        "install Debian's package dataset-fashion-mnist, or put the four IDX files there"
    )
