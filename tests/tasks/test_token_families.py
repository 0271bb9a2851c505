"""Every token family can be solved by the rule that its docstring states, and not by simpler ones.

Rules are closed forms that know the hidden directions, or a linear classifier fitted by least squares. Four classes:
chance is .25. Classes of equal mean may still differ in spread, which lets a linear classifier win a few points more.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from esper.tasks.instance import LabelledArrays
from esper.tasks.token_suite import (
    CLASSES,
    FEATURES,
    TOKENS,
    TRAINING,
    TRANSFER,
    Sampler,
    TokenLayer,
    TokenSuite,
    average_tokens,
    draw_directions,
    sample_context,
    sample_halves,
    sample_largest_mean,
    sample_largest_power,
    sample_order,
    sample_pointer,
    sample_product,
    sample_vote,
)

EXAMPLES = 4000
AT_CHANCE = 0.32

DIRECTIONS = draw_directions(np.random.default_rng(0))
Array = NDArray[np.floating]


def drawn(sampler: Sampler, seed: int = 1) -> LabelledArrays:
    return sampler(EXAMPLES, DIRECTIONS, np.random.default_rng(seed))


def accuracy(guesses: NDArray[np.integer], examples: LabelledArrays) -> float:
    return float((guesses == examples.labels).mean())


def linear_accuracy(sampler: Sampler, features: Callable[[Array], Array]) -> float:
    """Test accuracy of a least-squares classifier on ``features(inputs) [N, F]``."""

    def design(examples: LabelledArrays) -> Array:
        values = features(examples.inputs)
        return np.concatenate([values, np.ones((len(values), 1))], axis=1)

    train, test = drawn(sampler, 1), drawn(sampler, 2)
    weights, *_ = np.linalg.lstsq(design(train), np.eye(CLASSES)[train.labels], rcond=None)
    return accuracy((design(test) @ weights).argmax(axis=1), test)


def mean_token(inputs: Array) -> Array:
    return inputs.mean(axis=1)


def flat(inputs: Array) -> Array:
    return inputs.reshape(len(inputs), -1)


def per_token(inputs: Array) -> Array:
    """Random ReLU features of single tokens, mean over tokens: what a wide host could compute."""
    rng = np.random.default_rng(3)
    hidden = inputs @ rng.standard_normal((FEATURES, 200)) + rng.standard_normal((TOKENS, 200))
    return np.maximum(hidden, 0).mean(axis=1)


def moments(inputs: Array) -> Array:
    """Mean over tokens of all products of two features."""
    return np.einsum("ntf,ntg->nfg", inputs, inputs).reshape(len(inputs), -1) / TOKENS


def components(inputs: Array) -> Array:
    """Coordinates ``[N, TOKENS, FEATURES]`` along the hidden directions."""
    return inputs @ DIRECTIONS.T


def token_classes(inputs: Array) -> NDArray[np.integer]:
    return components(inputs)[..., :CLASSES].argmax(axis=-1)


def counts(classes: NDArray[np.integer]) -> NDArray[np.integer]:
    """How often each class occurs in rows of classes, ``[N, T]`` to ``[N, CLASSES]``."""
    return (classes[..., None] == np.arange(CLASSES)).sum(axis=1)


def halves_of(inputs: Array) -> tuple[Array, Array]:
    """Mean coordinates of the first and of the last half of the tokens."""
    values = components(inputs)
    return values[:, : TOKENS // 2].mean(axis=1), values[:, TOKENS // 2 :].mean(axis=1)


@pytest.mark.parametrize("distance", [1, 4])
class TestOrder:
    def steps(self, examples: LabelledArrays, distance: int) -> NDArray[np.integer]:
        classes = token_classes(examples.inputs)
        return counts((classes[:, distance:] - classes[:, :-distance]) % CLASSES).argmax(axis=1)

    def test_the_commonest_step_at_the_right_distance_determines_the_label(self, distance: int) -> None:
        examples = drawn(partial(sample_order, distance=distance))
        assert accuracy(self.steps(examples, distance), examples) > 0.9

    @pytest.mark.few(1)
    def test_single_tokens_tell_nothing(self, distance: int) -> None:
        assert linear_accuracy(partial(sample_order, distance=distance), per_token) < AT_CHANCE
        assert linear_accuracy(partial(sample_order, distance=distance), flat) < AT_CHANCE

    def test_reversing_the_tokens_negates_the_label(self, distance: int) -> None:
        examples = drawn(partial(sample_order, distance=distance))
        backwards = LabelledArrays(examples.inputs[:, ::-1], -examples.labels % CLASSES)
        assert accuracy(self.steps(backwards, distance), backwards) > 0.9


def test_neighbours_tell_nothing_about_far_order() -> None:
    examples = drawn(partial(sample_order, distance=4))
    assert accuracy(TestOrder().steps(examples, 1), examples) < AT_CHANCE


class TestContext:
    @pytest.mark.parametrize("flipped", [True, False])
    def test_signs_of_the_parts_tell_the_label(self, flipped: bool) -> None:
        examples = drawn(partial(sample_context, flipped=flipped))
        first, last = halves_of(examples.inputs)
        b0, b1, f = first[:, 0] + last[:, 0] > 0, last[:, 1] > 0, first[:, 2] > 0
        assert accuracy(b0 + 2 * (b1 ^ f if flipped else b1), examples) > 0.93

    def test_no_sum_over_tokens_determines_the_flipped_bit(self) -> None:
        for features in (flat, per_token):
            assert 0.45 < linear_accuracy(partial(sample_context, flipped=True), features) < 0.55

    def test_a_linear_rule_determines_both_bits_of_the_direct_variant(self) -> None:
        assert linear_accuracy(partial(sample_context, flipped=False), mean_token) > 0.9


class TestArgmax:
    def test_the_mean_token_determines_largest_mean(self) -> None:
        assert linear_accuracy(sample_largest_mean, mean_token) > 0.85

    def test_two_channels_lose_much_of_it(self) -> None:
        """What families bott and plain differ in: a bottleneck of two channels."""
        plane = DIRECTIONS[:2].T
        assert linear_accuracy(sample_largest_mean, lambda inputs: mean_token(inputs) @ plane) < 0.65

    def test_second_moments_tell_largest_power(self) -> None:
        assert linear_accuracy(sample_largest_power, moments) > 0.8

    def test_a_linear_host_is_at_chance_on_largest_power(self) -> None:
        assert linear_accuracy(sample_largest_power, flat) < AT_CHANCE


class TestVote:
    def test_normalised_tokens_tell_the_label_at_any_loudness(self) -> None:
        for spread in (0.2, 1.8):
            examples = drawn(partial(sample_vote, spread=spread))
            assert accuracy(counts(token_classes(examples.inputs)).argmax(axis=1), examples) > 0.88

    def test_loud_tokens_drown_the_others(self) -> None:
        loud = drawn(partial(sample_vote, spread=1.8))
        even = drawn(partial(sample_vote, spread=0.2))
        raw = [accuracy(components(e.inputs)[..., :CLASSES].mean(axis=1).argmax(axis=1), e) for e in (loud, even)]
        assert raw[0] < 0.75
        assert raw[1] > 0.85


class TestPointer:
    @pytest.mark.parametrize("distance", [1, 4])
    def test_the_token_behind_the_mark_is_the_label(self, distance: int) -> None:
        examples = drawn(partial(sample_pointer, distance=distance))
        marked = components(examples.inputs)[..., CLASSES].argmax(axis=1)
        target = (marked + distance) % TOKENS
        assert accuracy(token_classes(examples.inputs)[np.arange(EXAMPLES), target], examples) > 0.95

    @pytest.mark.parametrize("distance", [1, 4])
    @pytest.mark.few(1)
    def test_counting_classes_reveals_little(self, distance: int) -> None:
        assert 0.3 < linear_accuracy(partial(sample_pointer, distance=distance), per_token) < 0.55


class TestHalves:
    def test_agreeing_signs_are_the_label(self) -> None:
        examples = drawn(sample_halves)
        first, last = halves_of(examples.inputs)
        agree = first * last > 0
        assert accuracy(agree[:, 0] + 2 * agree[:, 1], examples) > 0.9

    def test_no_sum_over_tokens_reveals_anything(self) -> None:
        for features in (flat, per_token):
            assert linear_accuracy(sample_halves, features) < AT_CHANCE


class TestProduct:
    def test_signs_of_the_two_correlations_are_the_label(self) -> None:
        examples = drawn(sample_product)
        values = components(examples.inputs)
        correlation = (values[..., 0:2] * values[..., 2:4]).mean(axis=1)
        bits = correlation > 0
        assert accuracy(bits[:, 0] + 2 * bits[:, 1], examples) > 0.9

    def test_linear_rules_and_squares_of_single_features_tell_nothing(self) -> None:
        assert linear_accuracy(sample_product, flat) < AT_CHANCE
        assert linear_accuracy(sample_product, lambda inputs: np.square(components(inputs)).mean(axis=1)) < AT_CHANCE


@pytest.mark.parametrize(
    ("family", "variant"),
    [(family, variant) for table in (TRAINING, TRANSFER) for family, variants in table.items() for variant in variants],
)
def test_labels_are_balanced(family: str, variant: str) -> None:
    settings = {**TRAINING, **TRANSFER}[family][variant]
    for sampler in filter(None, (settings.sampler, settings.after_drift)):
        shares = np.bincount(drawn(sampler).labels, minlength=CLASSES) / EXAMPLES
        assert shares.min() > 0.2


# The token suite as SUITE defines it: families, variants, host and drift.


SUITE = TokenSuite()


@pytest.mark.parametrize("leading", [(), (3,)])
def test_the_mean_over_tokens_is_the_mean(leading: tuple[int, ...]) -> None:
    columns = torch.randn(*leading, 6, TOKENS, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = columns.transpose(-3, -1).requires_grad_()
    found, expected = average_tokens(features), features.mean(dim=-2)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((one * weights).sum(), features)[0] for one in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_drawn_settings_stay_in_their_ranges() -> None:
    sample = SUITE.sample(500, "train", np.random.default_rng(0))
    rates = np.array([instance.learning_rate for instance in sample])
    assert rates.min() >= 0.007
    assert rates.max() <= 0.015
    assert np.log(rates).mean() == pytest.approx(np.log(0.007 * 0.015) / 2, abs=0.05)
    assert {instance.rent for instance in sample} == {0.08}
    noisy = [instance for instance in sample if instance.variant == "noisy"]
    assert {(instance.train_size, instance.label_noise) for instance in noisy} == {(96, 0.4)}
    others = Counter(instance.train_size for instance in sample if instance.variant != "noisy")
    assert set(others) == {384, 512, 768}
    assert {instance.drift_step for instance in sample if instance.family == "drift"} == set(range(9, 15))
    assert {instance.drift_step for instance in sample if instance.family != "drift"} == {None}


def test_a_linear_host_is_linear_and_a_relu_host_is_not() -> None:
    rng = np.random.default_rng(0)
    inputs = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(0))
    for variant, is_linear in (("linear", True), ("relu", False)):
        host = SUITE.host(SUITE.draw("quad", variant, 0, rng))
        sums = host(inputs) + host(-inputs)
        assert torch.allclose(sums, 2 * host(torch.zeros_like(inputs)), atol=1e-5) == is_linear


def test_the_host_cannot_mix_tokens() -> None:
    """Swapping tokens after the position bias changes nothing but the order of a mean."""
    host = SUITE.host(SUITE.draw("order", "near_10_10_10", 0, np.random.default_rng(0)))
    inputs = torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(0))
    features = host.layer2(host.layer1(host.layer0(inputs)))
    changed = inputs.clone()
    changed[:, 3] += 1
    moved = (host.layer2(host.layer1(host.layer0(changed))) != features).any(dim=-1)
    assert moved[:, 3].all()
    assert not moved[:, [0, 1, 2, 4, 5, 6, 7]].any()


def test_drift_changes_the_task_for_every_part() -> None:
    instance = SUITE.draw("drift", "near", 5, np.random.default_rng(0))
    for part in ("train", "validation", "test"):
        before, after = SUITE.data(instance, part, 0), SUITE.data(instance, part, 1)
        assert len(before) == len(after)
        assert not torch.equal(before.labels, after.labels)
        assert not torch.equal(before.inputs, after.inputs)


def test_hidden_directions_are_shared_by_all_parts_of_an_instance() -> None:
    """A rule fitted to the training part must hold in the test part, and not in another instance."""
    rng = np.random.default_rng(0)
    first, second = (SUITE.draw("plain", "mean", seed, rng) for seed in (0, 1))

    def mean_tokens(part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.mean(dim=1), torch.ones(len(part), 1)], dim=1)

    train = SUITE.data(first, "train")
    weights = torch.linalg.lstsq(mean_tokens(train.inputs), torch.eye(4)[train.labels]).solution

    def accuracy(test_inputs: torch.Tensor, labels: torch.Tensor) -> float:
        return float(((mean_tokens(test_inputs) @ weights).argmax(dim=1) == labels).float().mean())

    own, foreign = SUITE.data(first, "test"), SUITE.data(second, "test")
    assert accuracy(own.inputs, own.labels) > 0.8
    assert accuracy(foreign.inputs, foreign.labels) < 0.6


@pytest.mark.parametrize("slopes", [0.0, 1.0, [0.0, 1.0, 0.0]])
def test_activations_are_equal_in_every_bit_whether_gradients_are_wanted_or_not(slopes: float | list[float]) -> None:
    layer = TokenLayer(2, 3, 0.0, torch.Generator().manual_seed(0))
    layer.slope = torch.tensor(slopes)
    x = torch.randn(*layer.slope.shape, 5, 8, 3, generator=torch.Generator().manual_seed(1))
    x[..., 0, :] = 0.0
    learned = layer.activate(x.clone().requires_grad_())
    expected = torch.where(x > 0, x, x * layer.slope[..., None, None, None])
    assert torch.equal(learned.detach().view(torch.int32), expected.view(torch.int32))
    assert torch.equal(layer.activate(x).view(torch.int32), expected.view(torch.int32))
