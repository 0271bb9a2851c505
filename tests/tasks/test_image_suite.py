"""The suite of images, whose problems are what they are said to be, and the suites on photographs in files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from esper.errors import TaskError
from esper.population.execution import can_merge
from esper.tasks import image_files, registry
from esper.tasks.image_files import CIFAR_FILES, CIFAR_TEST, FASHION_FILES, FIVE, FULL, STAGES, PhotoHost
from esper.tasks.image_suite import (
    CELLS,
    CLASSES,
    PIXELS,
    arrange_cells,
    sample_agreement,
    sample_context,
    sample_neighbours,
    sample_pointer,
    sample_power,
    sample_vote,
)
from esper.tasks.instance import PARTS, Instance
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite import Suite
from esper.train.settings import TrainSettings
from examples.planted_data import cifar_records, write_fashion_mnist, write_tar
from tasks.test_suites import test_padded_hosts_learn_like_narrow_ones as padded_hosts_learn_like_narrow_ones

SUITE = get_suite("images")
INSTANCES = [
    SUITE.draw(family, variant, 3, np.random.default_rng(0))
    for family in SUITE.families + SUITE.transfer_families
    for variant in SUITE.variants(family)
]
UNROTATED = np.eye(PIXELS, dtype=np.float32)
"""Patterns whose coefficients are the values of a cell."""


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_hosts_are_so_small_that_a_module_costs_something() -> None:
    """Where it costs next to nothing, the best schedule for all families plants everything."""
    for instance in INSTANCES:
        assert 450 < SUITE.parameters(instance) < 1000


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda one: one.name)
def test_no_feature_before_pooling_depends_on_another_cell(instance: Instance) -> None:
    """So a module that mixes cells has something to add."""
    host, image = SUITE.host(instance), torch.randn(2, *SUITE.input_shape, requires_grad=True)
    host.layer1(host.layer0(image))[:, :, 2, 3].square().sum().backward()
    seen = image.grad.abs().sum((0, 1)) > 0
    assert seen[8:12, 12:16].all()
    seen[8:12, 12:16] = False
    assert not seen.any()


def test_cells_are_squares_of_pixels_in_reading_order() -> None:
    cells = np.arange(CELLS * CELLS * PIXELS, dtype=np.float32).reshape(1, CELLS, CELLS, PIXELS)
    image = arrange_cells(cells)[0]
    assert np.array_equal(image[:, 4:8, 20:24].ravel(), cells[0, 1, 5])


@pytest.mark.parametrize("block", [1, 2])
def test_most_symbols_follow_from_their_left_neighbour_and_the_label(block: int) -> None:
    cells, labels = sample_neighbours(200, UNROTATED, rng(), block=block, faithful=0.8, amplitude=30.0)
    symbols = cells.argmax(-1)
    first = symbols[:, ::block, ::block]
    assert np.array_equal(first.repeat(block, axis=1).repeat(block, axis=2), symbols)
    follows = (first[:, :, :-1] + labels[:, None, None]) % CLASSES == first[:, :, 1:]
    assert follows.mean() == pytest.approx(0.8 + 0.2 / CLASSES, abs=0.03)


def test_the_context_is_the_top_left_quadrant() -> None:
    cells, labels = sample_context(200, UNROTATED, rng(), everywhere=30.0, amplitude=30.0)
    bits = (cells[..., :3] > 0).astype(np.int64)
    everywhere, late, early = bits[:, 2, 6, 0], bits[:, -1, -1, 1], bits[:, 0, 0, 2]
    assert np.array_equal(labels, everywhere + 2 * (late ^ early))
    assert abs(cells[:, : CELLS // 2, :, 1]).max() < 10, "the late bit is shown in the lower half only"


def test_the_label_has_the_largest_power_and_no_mean() -> None:
    cells, labels = sample_power(2000, UNROTATED, rng(), deviation=1.5, factor=1.6)
    power = np.square(cells[..., :CLASSES]).mean((1, 2))
    assert (power.argmax(1) == labels).mean() > 0.9
    means = np.stack([cells[labels == label].mean((0, 1, 2)) for label in range(CLASSES)])
    assert abs(means).max() < 0.05


def test_a_share_of_the_cells_votes_and_their_scales_vary_where_the_family_is_loud() -> None:
    cells, labels = sample_vote(200, UNROTATED, rng(), shown=0.5, amplitude=30.0)
    rows = np.arange(200)
    shows = np.take_along_axis(cells, labels[:, None, None, None], axis=-1)[..., 0] > 15
    assert shows.mean() == pytest.approx(0.5, abs=0.02)
    assert (cells.sum((1, 2))[rows, labels] == cells.sum((1, 2)).max(1)).all()
    loud, _ = sample_vote(200, UNROTATED, rng(), shown=0.5, amplitude=30.0, spread=1.8)
    spreads = [np.log(np.square(values).mean(-1)).std() for values in (cells[~shows], loud[~shows])]
    assert spreads[0] < 0.5 < 3 < spreads[1]


def test_the_pointer_is_left_of_the_label() -> None:
    cells, labels = sample_pointer(200, UNROTATED, rng(), amplitude=30.0, mark=60.0, marks=4)
    marked, symbols = cells[..., CLASSES] > 30, cells[..., :CLASSES].argmax(-1)
    assert (marked.sum((1, 2)) >= 1).all()
    assert marked.sum((1, 2)).max() == 4
    images, rows, columns = np.nonzero(marked)
    assert np.array_equal(symbols[images, rows, columns + 1], labels[images])


def test_the_bits_of_agreement_compare_the_halves() -> None:
    cells, labels = sample_agreement(200, UNROTATED, rng(), amplitude=30.0)
    signs = cells[..., :2] > 0
    agree = (signs[:, 0, 0] == signs[:, -1, -1]).astype(np.int64)
    assert np.array_equal(labels, agree[:, 0] + 2 * agree[:, 1])


def test_drift_comes_before_schedules_start_late() -> None:
    """The best schedules wait for it; those of a bench start at once or after three tenths."""
    draws = rng()
    drawn = [SUITE.draw("drift", "near", seed, draws) for seed in range(50)]
    assert max(one.drift_step or 0 for one in drawn) <= 0.3 * SUITE.steps


# The suites on Fashion-MNIST and CIFAR-10 read the published files where these lie, and say where if they do not.


PER_FILE = 300


def test_populations_of_photo_hosts_run_merged() -> None:
    """The fastest way for them: see docs/suite.md."""
    host = PhotoHost(3, FULL, 10, FIVE, torch.Generator().manual_seed(0))
    assert can_merge(host, torch.zeros(2, 3, 32, 32))


def test_a_stage_that_is_absent_passes_its_input_on_and_has_no_parameter() -> None:
    features = torch.randn(2, FULL[0], 8, 8)
    absent, present = (
        PhotoHost(3, FULL, 10, STAGES[name], torch.Generator()).early for name in ("3_stages", "4_stages")
    )
    assert absent(features) is features
    assert sum(one.numel() for one in absent.parameters()) == 0
    assert sum(one.numel() for one in present.parameters()) > 1000
    present.merge.weight.data.fill_(0.1)
    assert not torch.equal(present(features), features)


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


def planted_instance(suite: Suite, family: str = "clean", variant: str = "3_stages", **changes: object) -> Instance:
    drawn = suite.draw(family, variant, 3, np.random.default_rng(0))
    return Instance.from_json({**drawn.to_json(), "train_size": 512, **changes})


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_parts_are_rows_of_the_files_and_the_test_part_is_their_end(name: str, cache: Path) -> None:
    suite, images, labels = plant(cache, name)
    suite.test_size = PER_FILE  # as many as are planted
    instance = planted_instance(suite)
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
    instances = [planted_instance(suite, variant=variant) for variant in suite.variants("clean")]
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
            suite.data(planted_instance(suite), "train")


def test_pixels_stay_bytes_until_an_instance_reads_them(cache: Path) -> None:
    """As float32 CIFAR-10 would take 600 MB in every process."""
    suite, *_ = plant(cache, "cifar10")
    assert suite.dataset().inputs.dtype == np.uint8
    assert suite.data(planted_instance(suite, "grainy"), "train").inputs.dtype == torch.float32
