"""Digits and MNIST-1D: the data themselves, and how families change them."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from esper.errors import TaskError
from esper.tasks.datasets import CLASSES, LENGTH, digits, mnist1d, normalise_templates
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

SUITES = ("digits", "mnist1d", "mnist1d_conv")


def instance_of(name: str, family: str, **changes: object) -> Instance:
    suite = get_suite(name)
    drawn = suite.draw(family, suite.variants(family)[0], 3, np.random.default_rng(0))
    return Instance.from_json({**drawn.to_json(), **changes})


def test_mnist1d_has_the_published_shape() -> None:
    data = mnist1d()
    assert data.inputs.shape == (5000, LENGTH)
    assert np.bincount(data.labels).tolist() == [500] * CLASSES
    assert data.inputs.mean() == pytest.approx(0, abs=1e-5)
    assert data.inputs.std() == pytest.approx(1, abs=1e-5)


def test_mnist1d_is_shuffled() -> None:
    assert np.bincount(mnist1d().labels[-1000:]).min() > 60


def best_correlations(signals: np.ndarray, template: np.ndarray) -> np.ndarray:
    """The highest correlation ``[N]`` of a template with any window of circular signals ``[N, LENGTH]``."""
    width = len(template)
    windows = np.lib.stride_tricks.sliding_window_view(np.hstack([signals, signals[:, :width]]), width, axis=1)
    windows = windows - windows.mean(axis=-1, keepdims=True)
    centred = template - template.mean()
    lengths = np.linalg.norm(windows, axis=-1) * np.linalg.norm(centred)
    return (windows @ centred / lengths).max(axis=1)


def test_signals_contain_their_template_somewhere() -> None:
    """Matching templates of several widths at all shifts does twice as well as the best linear classifier."""
    data = mnist1d()
    signals, labels = data.inputs[:1000], data.labels[:1000]
    scores = np.full((len(signals), CLASSES), -1.0)
    for width in (7, 8, 9, 10):
        points = np.linspace(0, 11, width)
        for label, template in enumerate(normalise_templates()):
            stretched = np.interp(points, np.arange(12), template)
            scores[:, label] = np.maximum(scores[:, label], best_correlations(signals, stretched))
    assert (scores.argmax(axis=1) == labels).mean() > 0.5


@pytest.mark.slow
def test_logistic_regression_on_mnist1d_matches_the_published_accuracy() -> None:
    data = mnist1d()
    model = LogisticRegression(max_iter=500).fit(data.inputs[:4000], data.labels[:4000])
    assert model.score(data.inputs[4000:], data.labels[4000:]) == pytest.approx(0.32, abs=0.04)


def test_data_sets_are_read_only() -> None:
    for data in (digits(), mnist1d()):
        with pytest.raises(ValueError, match="read-only"):
            data.inputs[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            data.labels[0] = 0


@pytest.mark.parametrize("name", SUITES)
def test_test_part_is_the_end_of_the_data_set(name: str) -> None:
    suite = get_suite(name)
    whole = mnist1d() if name.startswith("mnist1d") else digits()
    instance = instance_of(name, "clean")
    data = suite.data(instance, "test")
    assert data.labels.tolist() == whole.labels[-suite.test_size :].tolist()
    raw = torch.from_numpy(whole.inputs[-suite.test_size :].copy()).reshape(data.inputs.shape)
    scaled = (data.inputs - data.inputs.mean()) / data.inputs.std()
    torch.testing.assert_close(scaled, (raw - raw.mean()) / raw.std(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SUITES)
def test_asking_for_more_data_than_exist_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match=r"needs 5000 training examples, but only \d+ exist"):
        get_suite(name).data(instance_of(name, "clean", train_size=5000), "train")


def test_scarce_instances_have_fewer_examples_than_any_other() -> None:
    for name in SUITES:
        suite = get_suite(name)
        sizes: dict[bool, set[int]] = {True: set(), False: set()}
        for instance in suite.sample(60, "train", np.random.default_rng(0)):
            sizes[instance.family == "scarce"].add(instance.train_size)
        assert max(sizes[True]) < min(sizes[False])


def test_masked_features_are_blank_in_every_part_alike() -> None:
    suite, instance = get_suite("mnist1d"), instance_of("mnist1d", "masked")
    blanks = [suite.data(instance, part).inputs.std(dim=0) == 0 for part in ("train", "validation", "test")]
    assert 5 < int(blanks[0].sum()) < 30
    assert torch.equal(blanks[0], blanks[1])
    assert torch.equal(blanks[0], blanks[2])


def test_grain_is_fresh_for_every_example() -> None:
    suite = get_suite("mnist1d")
    grainy = suite.data(instance_of("mnist1d", "grainy"), "test")
    clean = suite.data(instance_of("mnist1d", "clean"), "test")
    assert torch.equal(grainy.labels, clean.labels)
    noise = grainy.inputs - clean.inputs * (grainy.inputs * clean.inputs).mean() / clean.inputs.square().mean()
    assert float(noise.std()) == pytest.approx(0.5 / 1.25**0.5, abs=0.05)
    assert torch.corrcoef(noise[:50]).fill_diagonal_(0).abs().max() < 0.7
