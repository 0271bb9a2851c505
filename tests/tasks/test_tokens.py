"""The token suite as SUITE defines it: families, variants, host and drift."""

from collections import Counter

import numpy as np
import pytest
import torch

from esper.tasks.token_suite import TOKENS, TokenLayer, TokenSuite, average_tokens

SUITE = TokenSuite()


def test_the_full_host_has_404_parameters() -> None:
    assert sum(parameter.numel() for parameter in SUITE.template().parameters()) == 404


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


@pytest.mark.parametrize(
    ("family", "variants"),
    [("order", 5), ("ctx", 2), ("bott", 3), ("quad", 2), ("vote", 2), ("plain", 2), ("drift", 2)],
)
def test_families_have_their_variants(family: str, variants: int) -> None:
    assert family in SUITE.families
    assert len(SUITE.variants(family)) == variants


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
