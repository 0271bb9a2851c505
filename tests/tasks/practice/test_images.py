"""Every data set: read from where it is, split for good, and a sentence that helps where it is missing or damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.errors import TaskError
from esper.tasks.practice import images
from esper.tasks.practice.download import Remote, md5_of
from esper.tasks.practice.examples import Examples, Labelled, Windows
from esper.tasks.practice.images import TEST_FILE, TRAINING_FILES, Cifar10, FashionMnist
from esper.tasks.practice.registry import DataAccess, get_task
from esper.tasks.practice.text import CharLm
from tasks.practice.planted import cifar_records, write_fashion_mnist, write_tar

PER_FILE = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "PACKAGED", tmp_path / "packaged")
    return tmp_path / "cache" / "esper"


def rows(part: Examples) -> list[tuple[float, ...]]:
    assert isinstance(part, Labelled)
    return [tuple(row) for row in part.inputs.flatten(1).tolist()]


@pytest.mark.parametrize(("name", "total"), [("digits", 1797), ("mnist1d", 5000)])
def test_offline_data_are_split_into_disjoint_parts_that_never_change(name: str, total: int) -> None:
    splits = get_task(name).load(DataAccess())
    parts = [rows(part) for part in splits[:3]]
    assert sum(map(len, parts)) == total
    assert len({row for part in parts for row in part}) == total  # no two examples are equal in these sets
    assert rows(get_task(name).load(DataAccess()).validation) == parts[1]
    assert all(batch.targets.max() < splits.classes for batch in splits.train.in_order(total))


def cifar(cache: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Cifar10:
    path = cache / "cifar10" / "cifar-10-binary.tar.gz"
    write_tar(path, members, links)
    return Cifar10(Remote("http://127.0.0.1:1/", md5_of(path), 1), PER_FILE, validation=10)


def cifar_members() -> dict[str, bytes]:
    names = (*TRAINING_FILES, TEST_FILE)
    return {name: cifar_records(PER_FILE, seed).tobytes() for seed, name in enumerate(names)}


def test_cifar10_is_read_as_it_is_documented(cache: Path) -> None:
    splits = cifar(cache, cifar_members()).load(DataAccess())
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (50, 10, 12)
    test, records = splits.test, cifar_records(PER_FILE, len(TRAINING_FILES))
    assert isinstance(test, Labelled)
    assert test.labels.tolist() == records[:, 0].tolist()
    assert test.inputs.shape == (12, 3, 32, 32)
    assert test.inputs[5, 2, 7, 3] == records[5, 1 + 2 * 1024 + 7 * 32 + 3]
    pool = {tuple(row[1:]) for seed in range(5) for row in cifar_records(PER_FILE, seed).tolist()}
    assert {*rows(splits.train), *rows(splits.validation)} == pool


def test_cifar10_that_is_missing(cache: Path) -> None:
    with pytest.raises(TaskError, match=f"{cache}.*--download"):
        Cifar10().load(DataAccess())


def test_cifar10_that_is_damaged(cache: Path) -> None:
    task = cifar(cache, cifar_members())
    path = cache / "cifar10" / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TaskError, match="md5.*delete it"):
        task.load(DataAccess())


def test_cifar10_is_never_unpacked_and_links_in_it_are_not_followed(cache: Path, tmp_path: Path) -> None:
    members = {**cifar_members(), "../outside.bin": b"x"}
    del members[TEST_FILE]
    task = cifar(cache, members, {TEST_FILE: TRAINING_FILES[0]})
    with pytest.raises(TaskError, match=f"lacks {TEST_FILE}"):
        task.load(DataAccess())
    assert not list(tmp_path.rglob("*.bin"))


def test_cifar10_with_a_file_of_another_size_or_a_label_that_does_not_exist(cache: Path) -> None:
    with pytest.raises(TaskError, match="has 36875 bytes, not 36876"):
        cifar(cache, {**cifar_members(), TEST_FILE: cifar_members()[TEST_FILE][:-1]}).load(DataAccess())
    records = cifar_records(PER_FILE, 0)
    records[3, 0] = 10
    with pytest.raises(TaskError, match="a label 10"):
        cifar(cache, {**cifar_members(), TEST_FILE: records.tobytes()}).load(DataAccess())


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("packaged", [True, False])
def test_fashion_mnist_is_read_from_either_place(cache: Path, tmp_path: Path, compressed: bool, packaged: bool) -> None:
    folder = tmp_path / "packaged" if packaged else cache / "fashion-mnist"
    arrays = write_fashion_mnist(folder, 20, 6, compressed=compressed)
    splits = FashionMnist((20, 6), 5).load(DataAccess())
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (15, 5, 6)
    test = splits.test
    assert isinstance(test, Labelled)
    assert np.array_equal(test.inputs[:, 0].numpy(), arrays["t10k-images-idx3-ubyte"])
    assert test.labels.tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    assert not {*rows(splits.train)} & {*rows(splits.validation)}


def test_fashion_mnist_that_is_missing_or_not_whole(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"{cache}.*{tmp_path / 'packaged'}.*--download.*dataset-fashion-mnist"):
        FashionMnist().load(DataAccess())
    write_fashion_mnist(cache / "fashion-mnist", 20, 6, compressed=True)
    (cache / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(TaskError, match="neither in"):
        FashionMnist((20, 6), 5).load(DataAccess())


@pytest.mark.parametrize("damage", ["torn", "long", "foreign", "not gzip"])
def test_fashion_mnist_that_is_damaged(cache: Path, damage: str) -> None:
    write_fashion_mnist(cache / "fashion-mnist", 20, 6, compressed=True)
    path = cache / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    whole = gzip.decompress(path.read_bytes())
    spoilt = {
        "torn": gzip.compress(whole)[:-100],
        "long": gzip.compress(whole + b"x"),
        "foreign": gzip.compress(b"\0\0\x09" + whole[3:]),
        "not gzip": whole,
    }
    path.write_bytes(spoilt[damage])
    with pytest.raises(TaskError, match=str(path)):
        FashionMnist((20, 6), 5).load(DataAccess())


def test_a_text_is_split_by_position(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(1000, 3000))))  # every character once
    splits = CharLm().load(DataAccess(text=text))
    parts = [part.tokens.tolist() for part in splits[:3] if isinstance(part, Windows)]
    assert [len(part) for part in parts] == [1700, 100, 200]
    assert [token for part in parts for token in part] == list(range(2000))
    assert splits.classes == 2000


def test_the_usual_text_is_pythons_help() -> None:
    splits = CharLm().load(DataAccess())
    batch = next(splits.train.in_order(2))
    assert batch.inputs.dtype is torch.int64
    assert 50 < splits.classes < 300
    assert len(splits.train) > 1000
