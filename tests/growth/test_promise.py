"""What a module that does not exist yet could help: against plain autograd, and where the answer is known."""

import math

import pytest
import torch
from torch import Tensor, nn

from esper.growth import promise as promises
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.promise import (
    RIDGE,
    GradientBatch,
    compute_gram_matrix,
    compute_promise,
    compute_promise_from_gradients,
)
from esper.growth.site import Layout, Site
from growth.blueprint_cases import batch, draw, every_case, grown, newborn

EXAMPLES = 12


def gradients_like(features: Tensor) -> Tensor:
    return draw(*features.shape, seed=5)


def plain_gram(module: nn.Module, features: Tensor, inputs: Tensor, functional_gradients: Tensor) -> Tensor:
    """Example by example, by nothing but autograd."""
    rows = []
    for one in range(len(features)):
        output = module(features[one : one + 1], inputs[one : one + 1])
        gradients = torch.autograd.grad(
            (output * functional_gradients[one]).sum(), list(module.parameters()), allow_unused=True
        )
        rows.append(torch.cat([each.flatten() for each in gradients if each is not None]))
    stacked = torch.stack(rows)
    return stacked @ stacked.mT


@every_case
@pytest.mark.parametrize("make", [newborn, grown])
def test_the_gram_matrix_is_that_of_gradients_example_by_example(kind: type[Blueprint], site: Site, make) -> None:
    features, inputs = batch(site, EXAMPLES)
    module, functional_gradients = make(kind, site), gradients_like(features)
    expected = plain_gram(module, features, inputs, functional_gradients)
    assert expected.abs().max() > 0
    torch.testing.assert_close(
        compute_gram_matrix(module, [GradientBatch((features, inputs), functional_gradients)]), expected
    )


def test_memory_is_bounded_without_changing_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(Layout.TOKENS, width=6, extent=(4,), input_shape=(4, 6))
    features, inputs = batch(site, EXAMPLES)
    module, functional_gradients = newborn_of("mlp", site), gradients_like(features)
    expected = compute_gram_matrix(module, [GradientBatch((features, inputs), functional_gradients)])
    original, sizes = promises.compute_example_gradients, []

    def counted(module: nn.Module, names: list[str], gradient_batch: GradientBatch) -> Tensor:
        computed = original(module, names, gradient_batch)
        sizes.append(computed.nbytes)
        return computed

    monkeypatch.setattr(promises, "compute_example_gradients", counted)
    for limit in (sum(p.nbytes for p in module.parameters()) * 5, 1):
        sizes.clear()
        monkeypatch.setattr(promises, "GRAM_BYTES", limit)
        torch.testing.assert_close(
            compute_gram_matrix(module, [GradientBatch((features, inputs), functional_gradients)]), expected
        )
        assert 2 * max(sizes) <= limit or max(sizes) == min(sizes)
        assert len(sizes) > 1


def newborn_of(name: str, site: Site) -> Blueprint:
    return newborn(get(name), site)


def test_examples_may_come_in_batches_of_different_shapes() -> None:
    long = Site(Layout.TOKENS, width=6, extent=(8,), input_shape=())
    short = Site(Layout.TOKENS, width=6, extent=(5,), input_shape=())
    module, parts = newborn_of("attention", long), []
    for site in (long, short):
        features, _ = batch(site, EXAMPLES)
        parts.append(GradientBatch((features, features), gradients_like(features)))
    gram = compute_gram_matrix(module, parts)
    assert gram.shape == (2 * EXAMPLES, 2 * EXAMPLES)
    torch.testing.assert_close(gram, gram.mT)
    for part, place in zip(parts, (slice(EXAMPLES), slice(EXAMPLES, None)), strict=True):
        torch.testing.assert_close(gram[place, place], compute_gram_matrix(module, [part]))


def test_what_is_padded_asks_for_nothing() -> None:
    site = Site(Layout.TOKENS, width=6, extent=(5,), input_shape=())
    features, _ = batch(site, EXAMPLES)
    functional_gradients = gradients_like(features)
    wide = torch.cat([features, draw(EXAMPLES, 3, 6, seed=9)], 1)
    padded = torch.cat([functional_gradients, torch.zeros(EXAMPLES, 3, 6, dtype=functional_gradients.dtype)], 1)
    module = newborn_of("mlp", site)
    torch.testing.assert_close(
        compute_gram_matrix(module, [GradientBatch((wide, wide), padded)]),
        compute_gram_matrix(module, [GradientBatch((features, features), functional_gradients)]),
    )


def from_rows(rows: Tensor) -> Tensor:
    return rows @ rows.mT


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_examples_that_agree_are_granted_all_but_the_ridge(scale: float) -> None:
    gram = from_rows(scale * torch.ones(20, 3, dtype=torch.float64))
    assert compute_promise(gram).fitted.item() == pytest.approx(20 / (20 + RIDGE))
    assert compute_promise(gram).held_out.tolist() == pytest.approx([10 / (10 + RIDGE)] * 2)


def test_examples_that_contradict_each_other_are_granted_nothing() -> None:
    rows = draw(10, 4)
    gram = from_rows(torch.stack([rows, -rows], 1).flatten(0, 1))  # in pairs, so that each half contradicts itself
    assert compute_promise(gram).fitted.item() == pytest.approx(0, abs=1e-12)
    assert compute_promise(gram).held_out.tolist() == pytest.approx([0, 0], abs=1e-12)


def test_examples_with_nothing_in_common_are_granted_only_what_is_fitted() -> None:
    gram = 3.0 * torch.eye(20, dtype=torch.float64)
    assert compute_promise(gram).fitted.item() == pytest.approx(1 / (1 + RIDGE))
    assert compute_promise(gram).held_out.tolist() == [0, 0]


def test_promise_is_the_natural_gradient_s_squared_length() -> None:
    """``g^T (F + lambda I)^-1 g`` with g the mean gradient and F the empirical Fisher, its ridge divided by N."""
    rows = draw(30, 7) + 0.3
    mean, fisher = rows.mean(0), rows.mT @ rows / 30
    ridge = RIDGE * rows.square().sum(1).mean() / 30
    expected = mean @ torch.linalg.solve(fisher + ridge * torch.eye(7, dtype=rows.dtype), mean)
    for scale in (1.0, 1e-3, 1e3):
        torch.testing.assert_close(compute_promise(from_rows(scale * rows.roll(7, 0))).fitted, expected)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_held_out_promise_is_what_a_fitted_step_does_to_others(scale: float) -> None:
    """Whatever the scale of the gradients, and the order of examples within each half."""
    rows = draw(21, 7) + 0.3
    shuffled = scale * torch.cat([rows[:10].flip(0), rows[10:].roll(3, 0)])
    for (judged, fitted), computed in zip(
        ((rows[:10], rows[10:]), (rows[10:], rows[:10])), compute_promise(from_rows(shuffled)).held_out, strict=True
    ):
        ridge = RIDGE * fitted.square().sum(1).mean()
        step = fitted.mT @ torch.linalg.solve(
            fitted @ fitted.mT + ridge * torch.eye(len(fitted), dtype=rows.dtype), rows.new_ones(len(fitted))
        )
        torch.testing.assert_close(computed, (judged @ step).mean())


def test_noise_promises_nothing_to_others() -> None:
    """Over 200 draws the held-out mean is zero within three standard errors; what is fitted is not."""
    grams = torch.stack([from_rows(draw(40, 60, seed=seed)) for seed in range(200)])
    computed = compute_promise(grams).held_out.mean(-1)
    assert abs(computed.mean()) < 3 * computed.std() / math.sqrt(200)
    assert compute_promise(grams).fitted.mean() > 0.5


def test_many_networks_at_once() -> None:
    grams = torch.stack([from_rows(draw(10, 4, seed=seed)) for seed in range(6)]).view(2, 3, 10, 10)
    together, apart = compute_promise(grams).fitted, compute_promise(grams).held_out
    assert together.shape == (2, 3)
    assert apart.shape == (2, 3, 2)
    for row in range(2):
        for column in range(3):
            torch.testing.assert_close(together[row, column], compute_promise(grams[row, column]).fitted)
            torch.testing.assert_close(apart[row, column], compute_promise(grams[row, column]).held_out)


def test_one_diverged_network_does_not_touch_others() -> None:
    grams = torch.stack([from_rows(draw(10, 4)), torch.full((10, 10), math.nan), torch.zeros(10, 10)]).double()
    torch.testing.assert_close(compute_promise(grams).fitted[0], compute_promise(grams[0]).fitted)
    assert compute_promise(grams).fitted[1].isnan()
    assert compute_promise(grams).fitted[2] == 0
    assert compute_promise(grams).held_out[2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("examples", "parameters"),
    [(40, 7), (41, 7), (12, 9), (41, 30), (12, 30)],
    ids=["few", "uneven", "more than half", "more than half, uneven", "many"],
)
def test_it_is_the_same_from_the_gradients_themselves_in_either_space(examples: int, parameters: int) -> None:
    rows = draw(3, examples, parameters, seed=8).double() + 0.3
    rows[1] = 0
    gram, computed = rows @ rows.mT, compute_promise_from_gradients(rows)
    torch.testing.assert_close(computed.fitted, compute_promise(gram).fitted)
    torch.testing.assert_close(computed.held_out, compute_promise(gram).held_out)
    assert computed.held_out[0, 0] != computed.held_out[0, 1]
    for bad in (math.nan, math.inf):
        rows[2, 0, 0] = bad
        broken = compute_promise_from_gradients(rows)
        assert broken.fitted[2].isnan()
        assert broken.held_out[2].mean().isnan()
        torch.testing.assert_close(broken.fitted[:2], computed.fitted[:2])
