"""What a module that does not exist yet could help: against plain autograd, and where the answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from esper.growth import promise as promises
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.promise import (
    RIDGE,
    GradientBatch,
    compute_held_out_promise,
    compute_promise_from_gradients,
    gram_of,
    promise,
)
from esper.growth.site import Layout, Site
from growth.blueprint_cases import batch, draw, every_case, grown, newborn

EXAMPLES = 12


def wishes_like(features: Tensor) -> Tensor:
    return draw(*features.shape, seed=5)


def plain_gram(module: nn.Module, features: Tensor, inputs: Tensor, wishes: Tensor) -> Tensor:
    """Example by example, by nothing but autograd."""
    rows = []
    for one in range(len(features)):
        output = module(features[one : one + 1], inputs[one : one + 1])
        gradients = torch.autograd.grad((output * wishes[one]).sum(), list(module.parameters()), allow_unused=True)
        rows.append(torch.cat([each.flatten() for each in gradients if each is not None]))
    stacked = torch.stack(rows)
    return stacked @ stacked.mT


@every_case
@pytest.mark.parametrize("make", [newborn, grown])
def test_the_gram_matrix_is_that_of_gradients_example_by_example(kind: type[Blueprint], site: Site, make) -> None:
    features, inputs = batch(site, EXAMPLES)
    module, wishes = make(kind, site), wishes_like(features)
    expected = plain_gram(module, features, inputs, wishes)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gram_of(module, [GradientBatch((features, inputs), wishes)]), expected)


def test_memory_is_bounded_without_changing_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(Layout.TOKENS, width=6, extent=(4,), input_shape=(4, 6))
    features, inputs = batch(site, EXAMPLES)
    module, wishes = newborn_of("mlp", site), wishes_like(features)
    whole = gram_of(module, [GradientBatch((features, inputs), wishes)])
    usual, sizes = promises.example_gradients, []

    def counted(module: nn.Module, names: list[str], given: GradientBatch) -> Tensor:
        found = usual(module, names, given)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(promises, "example_gradients", counted)
    for limit in (sum(p.nbytes for p in module.parameters()) * 5, 1):
        sizes.clear()
        monkeypatch.setattr(promises, "GRAM_BYTES", limit)
        torch.testing.assert_close(gram_of(module, [GradientBatch((features, inputs), wishes)]), whole)
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
        parts.append(GradientBatch((features, features), wishes_like(features)))
    gram = gram_of(module, parts)
    assert gram.shape == (2 * EXAMPLES, 2 * EXAMPLES)
    torch.testing.assert_close(gram, gram.mT)
    for part, place in zip(parts, (slice(EXAMPLES), slice(EXAMPLES, None)), strict=True):
        torch.testing.assert_close(gram[place, place], gram_of(module, [part]))


def test_what_is_padded_asks_for_nothing() -> None:
    site = Site(Layout.TOKENS, width=6, extent=(5,), input_shape=())
    features, _ = batch(site, EXAMPLES)
    wishes = wishes_like(features)
    wide = torch.cat([features, draw(EXAMPLES, 3, 6, seed=9)], 1)
    asked = torch.cat([wishes, torch.zeros(EXAMPLES, 3, 6, dtype=wishes.dtype)], 1)
    module = newborn_of("mlp", site)
    torch.testing.assert_close(
        gram_of(module, [GradientBatch((wide, wide), asked)]),
        gram_of(module, [GradientBatch((features, features), wishes)]),
    )


def from_rows(rows: Tensor) -> Tensor:
    return rows @ rows.mT


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_examples_that_agree_are_granted_all_but_the_ridge(scale: float) -> None:
    gram = from_rows(scale * torch.ones(20, 3, dtype=torch.float64))
    assert promise(gram).item() == pytest.approx(20 / (20 + RIDGE))
    assert compute_held_out_promise(gram).tolist() == pytest.approx([10 / (10 + RIDGE)] * 2)


def test_examples_that_contradict_each_other_are_granted_nothing() -> None:
    rows = draw(10, 4)
    gram = from_rows(torch.stack([rows, -rows], 1).flatten(0, 1))  # in pairs, so that each half contradicts itself
    assert promise(gram).item() == pytest.approx(0, abs=1e-12)
    assert compute_held_out_promise(gram).tolist() == pytest.approx([0, 0], abs=1e-12)


def test_examples_with_nothing_in_common_are_granted_only_what_is_fitted() -> None:
    gram = 3.0 * torch.eye(20, dtype=torch.float64)
    assert promise(gram).item() == pytest.approx(1 / (1 + RIDGE))
    assert compute_held_out_promise(gram).tolist() == [0, 0]


def test_a_linear_problem_with_a_known_answer() -> None:
    """A bias b under the squared error of targets t = 1 + noise: G = -2 t, so K = 4 t t^T and all is one number."""
    targets = 1 + 0.5 * draw(200)
    rows = (-2 * targets).unsqueeze(1)
    total, ridge = float(targets.square().sum()), RIDGE * float(targets.square().mean())
    expected = float(targets.sum()) ** 2 / (len(targets) * (total + ridge))
    assert promise(from_rows(rows)).item() == pytest.approx(expected)

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, features: Tensor) -> Tensor:
            return self.bias.expand_as(features)

    features = torch.zeros(200, 1, dtype=torch.float64)
    wishes = (2 * (features - targets.unsqueeze(1))).detach()
    assert promise(gram_of(Bias(), [GradientBatch((features,), wishes)])).item() == pytest.approx(expected)


def test_promise_is_the_natural_gradient_s_squared_length() -> None:
    """``g^T (F + lambda I)^-1 g`` with g the mean gradient and F the empirical Fisher, its ridge divided by N."""
    rows = draw(30, 7) + 0.3
    mean, fisher = rows.mean(0), rows.mT @ rows / 30
    ridge = RIDGE * rows.square().sum(1).mean() / 30
    expected = mean @ torch.linalg.solve(fisher + ridge * torch.eye(7, dtype=rows.dtype), mean)
    torch.testing.assert_close(promise(from_rows(rows)), expected)


def test_held_out_promise_is_what_a_fitted_step_does_to_others() -> None:
    rows = draw(21, 7) + 0.3
    for (judged, fitted), found in zip(
        ((rows[:10], rows[10:]), (rows[10:], rows[:10])), compute_held_out_promise(from_rows(rows)), strict=True
    ):
        ridge = RIDGE * fitted.square().sum(1).mean()
        step = fitted.mT @ torch.linalg.solve(
            fitted @ fitted.mT + ridge * torch.eye(len(fitted), dtype=rows.dtype), rows.new_ones(len(fitted))
        )
        torch.testing.assert_close(found, (judged @ step).mean())


def test_order_and_scale_of_examples_do_not_matter() -> None:
    rows = draw(20, 6) + 0.2
    shuffled = rows[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    torch.testing.assert_close(promise(from_rows(rows)), promise(from_rows(shuffled)))
    within = torch.cat([rows[:10].flip(0), rows[10:].flip(0)])
    torch.testing.assert_close(compute_held_out_promise(from_rows(rows)), compute_held_out_promise(from_rows(within)))
    for scale in (1e-6, 1e6):
        torch.testing.assert_close(promise(scale * from_rows(rows)), promise(from_rows(rows)))
        torch.testing.assert_close(
            compute_held_out_promise(scale * from_rows(rows)), compute_held_out_promise(from_rows(rows))
        )


def test_noise_promises_nothing_to_others() -> None:
    """Over 200 draws the held-out mean is zero within three standard errors; what is fitted is not."""
    grams = torch.stack([from_rows(draw(40, 60, seed=seed)) for seed in range(200)])
    found = compute_held_out_promise(grams).mean(-1)
    assert abs(found.mean()) < 3 * found.std() / math.sqrt(200)
    assert promise(grams).mean() > 0.5


def test_many_networks_at_once() -> None:
    grams = torch.stack([from_rows(draw(10, 4, seed=seed)) for seed in range(6)]).view(2, 3, 10, 10)
    together, apart = promise(grams), compute_held_out_promise(grams)
    assert together.shape == (2, 3)
    assert apart.shape == (2, 3, 2)
    for row in range(2):
        for column in range(3):
            torch.testing.assert_close(together[row, column], promise(grams[row, column]))
            torch.testing.assert_close(apart[row, column], compute_held_out_promise(grams[row, column]))


def test_one_diverged_network_does_not_touch_others() -> None:
    grams = torch.stack([from_rows(draw(10, 4)), torch.full((10, 10), math.nan), torch.zeros(10, 10)]).double()
    torch.testing.assert_close(promise(grams)[0], promise(grams[0]))
    assert promise(grams)[1].isnan()
    assert promise(grams)[2] == 0
    assert compute_held_out_promise(grams)[2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("examples", "parameters"),
    [(40, 7), (41, 7), (12, 9), (41, 30), (12, 30)],
    ids=["few", "uneven", "more than half", "more than half, uneven", "many"],
)
def test_it_is_the_same_from_the_gradients_themselves_in_either_space(examples: int, parameters: int) -> None:
    rows = draw(3, examples, parameters, seed=8).double() + 0.3
    rows[1] = 0
    gram, found = rows @ rows.mT, compute_promise_from_gradients(rows)
    torch.testing.assert_close(found.fitted, promise(gram))
    torch.testing.assert_close(found.held_out, compute_held_out_promise(gram))
    assert found.held_out[0, 0] != found.held_out[0, 1]
    for bad in (math.nan, math.inf):
        rows[2, 0, 0] = bad
        broken = compute_promise_from_gradients(rows)
        assert broken.fitted[2].isnan()
        assert broken.held_out[2].mean().isnan()
        torch.testing.assert_close(broken.fitted[:2], found.fitted[:2])
