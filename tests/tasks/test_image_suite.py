"""The suite of images: its hosts have three to five stages, and its problems are what they are said to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.population.execution import can_merge
from esper.tasks.image_problems import draw_labels
from esper.tasks.image_suite import FULL, STAGES, ImageHost
from esper.tasks.instance import Instance, Part
from esper.tasks.registry import get_suite

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
        assert image.grad is not None
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
    monkeypatch.setattr("esper.tasks.image_problems.draw_background", lambda count, *_: np.zeros((count, 3, 32, 32)))
    monkeypatch.setattr("esper.tasks.image_problems.draw_colours", lambda count, _: np.zeros((count, 3)))
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
