"""The suite of images: its hosts have three to five stages, and its problems are what they are said to be."""

from pathlib import Path

import numpy as np
import pytest
import torch

from esper.errors import TaskError
from esper.population.execution import can_merge
from esper.tasks import image_files, registry
from esper.tasks.image_files import CIFAR_FILES, CIFAR_TEST, FASHION_FILES
from esper.tasks.image_suite import FULL, STAGES, ImageHost, draw_labels
from esper.tasks.instance import PARTS, Instance, Part
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite import Suite
from esper.train.settings import TrainSettings
from examples.planted_data import cifar_records, write_fashion_mnist, write_tar
from tasks.test_suites import test_padded_hosts_learn_like_narrow_ones as padded_hosts_learn_like_narrow_ones

SUITE = get_suite("images")


def instance_of(family: str, variant: str, seed: int = 3) -> Instance:
    return SUITE.draw(family, variant, seed, np.random.default_rng(0))


def build_host(stages: tuple[str, ...]) -> ImageHost:
    return ImageHost(3, FULL, 10, stages, torch.Generator().manual_seed(0))


def images_of(family: str, variant: str, part: Part = "test") -> tuple[torch.Tensor, torch.Tensor]:
    data = SUITE.data(instance_of(family, variant), part)
    return data.inputs, data.labels


def test_hosts_have_three_to_five_stages_and_ten_thousand_parameters_or_more() -> None:
    counts = {name: sum(one.numel() for one in build_host(stages).parameters()) for name, stages in STAGES.items()}
    assert list(counts) == ["3_stages", "4_stages", "5_stages"]
    assert 9_000 < counts["3_stages"] < counts["4_stages"] < counts["5_stages"] < 100_000


def test_a_stage_that_is_absent_passes_its_input_on_and_has_no_parameter() -> None:
    features = torch.randn(2, FULL[0], 8, 8)
    host = build_host(())
    assert host.early(features) is features
    assert sum(one.numel() for one in host.early.parameters()) == 0
    present = build_host(("early",)).early
    assert sum(one.numel() for one in present.parameters()) > 1000
    present.merge.weight.data.fill_(0.1)
    assert not torch.equal(present(features), features)


def test_without_residual_stages_no_position_sees_beyond_its_patch() -> None:
    """So a seed that mixes neighbours has something to add."""
    for stages, elsewhere in (((), False), (("early",), True)):
        host = build_host(stages)
        for stage in (host.early, host.late):
            stage.merge.weight.data.fill_(0.1)
        image = torch.randn(1, 3, 32, 32, requires_grad=True)
        features = host.fusion(host.late(host.halving(host.early(host.patches(image)))))
        features[0, :, 1, 1].sum().backward()
        seen = image.grad[0].abs().sum(0) > 0
        assert seen[8:16, 8:16].any()
        seen[8:16, 8:16] = False
        assert bool(seen.any()) == elsewhere


def test_populations_of_its_hosts_run_merged() -> None:
    """The fastest way for them: see docs/suite.md."""
    assert can_merge(SUITE.template(), torch.zeros(2, *SUITE.input_shape))


def test_labels_are_balanced_and_in_random_order() -> None:
    labels = draw_labels(34, np.random.default_rng(0))
    assert sorted(np.bincount(labels)) == [3] * 6 + [4] * 4
    assert labels.tolist() != sorted(labels)
    assert labels.tolist() != [*range(10)] * 3 + [*range(4)]


def test_brightness_varies_in_the_loud_variant_only() -> None:
    spreads = [images_of("bright", variant)[0].flatten(1).std(1).log().std() for variant in ("loud", "even")]
    assert spreads[0] > 1 > 0.4 > spreads[1]


def test_shapes_fill_as_much_of_the_image_as_their_class_says() -> None:
    inputs, labels = images_of("shape", "large_3_stages")
    brightness = torch.stack([inputs[labels == label].mean() for label in range(10)])
    disc, square, ring, lying_bar = (int(label) for label in (0, 1, 4, 8))
    assert min(brightness[disc], brightness[square]) > max(brightness[ring], brightness[lying_bar])


def test_more_dots_are_brighter() -> None:
    inputs, labels = images_of("dots", "large")
    brightness = torch.stack([inputs[labels == label].mean() for label in range(10)])
    assert torch.equal(brightness.argsort(), torch.arange(10))


def test_the_mean_colour_shows_the_hue_and_no_texture() -> None:
    for family, variant, solvable in (("plain", "hue", True), ("texture", "coarse", False)):
        (inputs, labels), (test_inputs, test_labels) = (images_of(family, variant, part) for part in ("train", "test"))
        means = inputs.mean((-2, -1))
        centres = torch.stack([means[labels == label].mean(0) for label in range(10)])
        guesses = torch.cdist(test_inputs.mean((-2, -1)), centres).argmin(1)
        accuracy = (guesses == test_labels).float().mean()
        assert accuracy > 0.8 if solvable else accuracy < 0.3


def test_no_handwritten_digit_is_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.tasks.image_suite.draw_background", lambda count, *_: np.zeros((count, 3, 32, 32)))
    monkeypatch.setattr("esper.tasks.image_suite.draw_colours", lambda count, _: np.zeros((count, 3)))
    instance = instance_of("glyph", "3_stages")
    shown: list[set[bytes]] = []
    for part in ("train", "validation", "test"):
        images = SUITE.data(instance, part).inputs[:, 0].numpy()
        shown.append({crop(image - image.min()).tobytes() for image in images})
    assert not shown[0] & shown[1]
    assert not (shown[0] | shown[1]) & shown[2]


def crop(image: np.ndarray) -> np.ndarray:
    """The pixels that are not black, wherever they lie."""
    rows, columns = np.nonzero(image.any(1))[0], np.nonzero(image.any(0))[0]
    return image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].round(4)


# The suites on Fashion-MNIST and CIFAR-10 read the published files where these lie, and say where if they do not.


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
