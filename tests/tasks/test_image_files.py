"""The suites on Fashion-MNIST and CIFAR-10 read the published files where these lie, and say where if they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from esper.errors import TaskError
from esper.tasks import image_files, registry
from esper.tasks.image_files import CIFAR_FILES, CIFAR_TEST, FASHION_FILES
from esper.tasks.instance import PARTS, Instance
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite import Suite
from esper.train.settings import TrainSettings
from examples.planted_data import cifar_records, write_fashion_mnist, write_tar
from tasks.test_padding import test_padded_hosts_learn_like_narrow_ones as padded_hosts_learn_like_narrow_ones

PER_FILE = 300


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of cached data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_files, "PACKAGED", tmp_path / "packaged")
    registry._make_suite.cache_clear()
    return tmp_path / "esper"


def plant(cache: Path, name: str) -> tuple[Suite, np.ndarray, np.ndarray]:
    """The suite on planted files, with all images and labels that it may show, in the order of the files."""
    if name == "fashion_mnist":
        arrays = write_fashion_mnist(cache / "fashion-mnist", 5 * PER_FILE, PER_FILE, compressed=True)
        images, labels, test_images, test_labels = (arrays[file] for file in FASHION_FILES)
        return get_suite(name), np.concatenate([images, test_images])[:, None], np.concatenate([labels, test_labels])
    records = [cifar_records(PER_FILE, seed) for seed in range(6)]
    files = zip((*CIFAR_FILES, CIFAR_TEST), records, strict=True)
    write_tar(cache / "cifar10" / "cifar-10-binary.tar.gz", {file: part.tobytes() for file, part in files})
    everything = np.concatenate(records)
    return get_suite(name), everything[:, 1:].reshape(-1, 3, 32, 32), everything[:, 0]


def instance_of(suite: Suite, family: str = "clean", variant: str = "3_stages", **changes: object) -> Instance:
    drawn = suite.draw(family, variant, 3, np.random.default_rng(0))
    return Instance.from_json({**drawn.to_json(), "train_size": 512, **changes})


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_parts_are_rows_of_the_files_and_the_test_part_is_their_end(name: str, cache: Path) -> None:
    suite, images, labels = plant(cache, name)
    suite.test_size = PER_FILE  # as many as are planted
    instance = instance_of(suite)
    frame = (32 - images.shape[-1]) // 2
    placed = {image.tobytes(): row for row, image in enumerate(images)}
    rows: list[int] = []
    scale = None
    for part in PARTS:
        data = suite.data(instance, part)
        inputs = data.inputs.numpy()
        assert inputs.shape[1:] == suite.input_shape
        # Back to bytes: black is the least value, and white the greatest.
        low, high = (inputs.min(), inputs.max()) if scale is None else scale
        scale = low, high
        pixels = np.rint((inputs - low) / (high - low) * 255).astype(np.uint8)
        if frame:
            assert not pixels[:, :, :frame].any()
            pixels = pixels[:, :, frame:-frame, frame:-frame]
        own = [placed[image.tobytes()] for image in pixels]
        assert data.labels.tolist() == labels[own].tolist()
        rows += own
    assert len(set(rows)) == len(rows) == 512 + suite.validation_size + PER_FILE
    assert rows[-PER_FILE:] == list(range(5 * PER_FILE, 6 * PER_FILE))


@pytest.mark.landing
@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_hosts_have_the_stages_of_their_variant_and_may_be_padded(name: str, cache: Path) -> None:
    suite, *_ = plant(cache, name)
    instances = [instance_of(suite, variant=variant) for variant in suite.variants("clean")]
    assert [one.variant for one in instances] == ["3_stages", "4_stages", "5_stages"]
    counts = [suite.parameters(one) for one in instances]
    assert counts == sorted(set(counts))
    template = suite.template()
    assert sum(one.numel() for one in template.parameters()) == counts[-1]
    padded_hosts_learn_like_narrow_ones(suite, instances[:1])


def test_a_data_set_that_is_not_there_is_refused_with_the_places_where_it_belongs(cache: Path) -> None:
    for name, place in (("fashion_mnist", "fashion-mnist"), ("cifar10", "cifar10")):
        with pytest.raises(TaskError, match=f"suite '{name}' reads .*{cache / place}"):
            get_suite(name)
        with pytest.raises(TaskError, match=f"suite '{name}' reads"):
            TrainSettings.model_validate({"suite": name})
        with pytest.raises(TaskError, match=f"suite '{name}' reads"):
            TrainSettings.model_validate({"mix": ["images", name]})
        assert name not in suite_names()
    with pytest.raises(TaskError, match="did you mean 'cifar10'"):
        get_suite("cifar")


def test_a_label_that_does_not_exist_or_is_missing_is_refused(cache: Path) -> None:
    suite, *_ = plant(cache, "fashion_mnist")
    path = cache / "fashion-mnist" / "t10k-labels-idx1-ubyte"
    compressed = path.with_suffix(".gz")
    compressed.unlink()
    for labels in (np.full(PER_FILE, 10, np.uint8), np.zeros(PER_FILE - 1, np.uint8)):
        path.write_bytes(b"\0\0\x08\x01" + len(labels).to_bytes(4, "big") + labels.tobytes())
        registry._make_suite.cache_clear()
        image_files._flatten_images.cache_clear()
        suite = get_suite("fashion_mnist")
        with pytest.raises(TaskError, match=f"{path} does not hold one of 10 labels"):
            suite.data(instance_of(suite), "train")


def test_pixels_stay_bytes_until_an_instance_reads_them(cache: Path) -> None:
    """As float32 CIFAR-10 would take 600 MB in every process."""
    suite, *_ = plant(cache, "cifar10")
    assert suite.dataset().inputs.dtype == np.uint8  # type: ignore[attr-defined]
    assert suite.data(instance_of(suite, "grainy"), "train").inputs.dtype == torch.float32
