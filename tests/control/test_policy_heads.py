"""Masked distributions: nothing illegal is drawn, and nothing illegal learns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from control.synthetic import generator, masks
from esper.control.policy.heads import (
    draw,
    gather_log_probs,
    legal_choices,
    masked_log_softmax,
    normalised_entropy,
    raise_to_floor,
)
from esper.lifecycle.actions import RELEVANT, Head, Op

DRAWS = 100_000


def test_no_illegal_choice_in_many_draws_even_at_extreme_logits_and_uniforms() -> None:
    random = generator(1)
    logits = torch.randn(DRAWS, 6, generator=random) * 30
    legal = torch.rand(DRAWS, 6, generator=random) < 0.4
    legal[torch.arange(DRAWS), torch.randint(6, (DRAWS,), generator=random)] = True
    uniforms = torch.rand(DRAWS, generator=random)
    uniforms[: DRAWS // 4] = 0.0
    uniforms[DRAWS // 4 : DRAWS // 2] = 1.0

    choices = draw(masked_log_softmax(logits, legal), legal, uniforms)

    assert legal.gather(1, choices[:, None]).all()


def test_without_a_mask_the_same_draws_do_hit_illegal_choices() -> None:
    legal = torch.tensor([[True, False, True]]).expand(DRAWS, -1)
    everything = torch.ones_like(legal)
    uniforms = torch.rand(DRAWS, generator=generator())
    choices = draw(masked_log_softmax(torch.zeros(DRAWS, 3), everything), everything, uniforms)
    assert not legal.gather(1, choices[:, None]).all()


def test_draws_follow_the_distribution() -> None:
    legal = torch.tensor([[True, False, True, True]]).expand(DRAWS, -1)
    logits = torch.tensor([[0.0, 9.0, 1.0, -1.0]]).expand(DRAWS, -1)
    log_probs = masked_log_softmax(logits, legal)
    choices = draw(log_probs, legal, torch.rand(DRAWS, generator=generator()))
    frequencies = torch.bincount(choices, minlength=4) / DRAWS
    torch.testing.assert_close(frequencies, log_probs[0].exp(), atol=5e-3, rtol=0)


@given(st.floats(0, 1), st.integers(1, 15))
def test_a_draw_inverts_the_cumulated_distribution(uniform: float, pattern: int) -> None:
    legal = torch.tensor([[bool(pattern >> i & 1) for i in range(4)]])
    choice = draw(masked_log_softmax(torch.zeros(1, 4), legal), legal, torch.tensor([uniform]))
    lawful = legal[0].nonzero().flatten().tolist()
    expected = {lawful[min(int(u * len(lawful)), len(lawful) - 1)] for u in (uniform - 1e-6, uniform, uniform + 1e-6)}
    assert int(choice) in expected


def test_masked_logits_have_zero_probability_and_exactly_zero_gradient() -> None:
    logits = torch.randn(50, 5, generator=generator(), requires_grad=True)
    legal = torch.rand(50, 5, generator=generator(1)) < 0.5
    legal[:, 2] = True
    log_probs = masked_log_softmax(logits, legal)
    (log_probs[:, 2].sum() + normalised_entropy(log_probs, legal).sum()).backward()

    assert (log_probs.exp()[~legal] == 0).all()
    assert logits.grad is not None
    assert (logits.grad[~legal] == 0).all()
    assert (logits.grad[legal & (legal.sum(1, keepdim=True) > 1)] != 0).all()


def test_a_single_legal_choice_is_certain_and_learns_nothing() -> None:
    logits = torch.tensor([[3.0, -2.0, 0.5]], requires_grad=True)
    legal = torch.tensor([[False, True, False]])
    log_probs = masked_log_softmax(logits, legal)
    entropy = normalised_entropy(log_probs, legal)
    (log_probs[0, 1] + entropy.sum()).backward()
    assert log_probs[0, 1] == 0
    assert entropy == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("count", [2, 3, 6])
def test_uniform_choice_has_entropy_one_however_many_are_legal(count: int) -> None:
    legal = torch.arange(6)[None] < count
    entropy = normalised_entropy(masked_log_softmax(torch.zeros(1, 6), legal), legal)
    assert entropy.item() == pytest.approx(1.0)


def test_entropy_is_in_units_of_the_legal_maximum() -> None:
    legal = torch.tensor([[True, True, False]])
    entropy = normalised_entropy(masked_log_softmax(torch.tensor([[math.log(3.0), 0.0, 5.0]]), legal), legal)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert entropy.item() == pytest.approx(expected)


@pytest.mark.parametrize("head", list(Head)[1:])
def test_an_irrelevant_head_has_the_single_choice_zero(head: Head) -> None:
    legality = masks((40,))
    op = torch.arange(40) % len(Op)
    slot = torch.arange(40) % 3
    relevant = torch.from_numpy(RELEVANT)[op]
    legal = legal_choices(legality, head, op, slot, relevant)
    ignored = legal[~relevant[:, head]]
    assert (ignored.sum(1) == 1).all()
    assert ignored[:, 0].all()


FLOORS = [0.0, 1e-6, 0.01, 0.1, 0.25, 1 / 3, 0.49]


@given(
    st.sampled_from(FLOORS),
    st.lists(st.tuples(st.floats(-200, 200, width=32), st.booleans()), min_size=1, max_size=9),
)
def test_no_legal_choice_is_below_its_floor_and_no_illegal_one_above_zero(
    floor: float, choices: list[tuple[float, bool]]
) -> None:
    legal = torch.tensor([[allowed for _, allowed in choices]])
    legal[0, 0] = True
    count = int(legal.sum())
    before = masked_log_softmax(torch.tensor([[logit for logit, _ in choices]]), legal)
    after = raise_to_floor(before, legal, floor)
    probabilities, unmixed = after.double().exp(), before.double().exp()
    least = min(floor, 1 / count)
    assert after.isfinite().all()
    assert probabilities[legal].amin() >= least * (1 - 1e-5)
    assert (probabilities[~legal] == 0).all()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(probabilities[legal], (1 - count * least) * unmixed[legal] + least, atol=1e-6, rtol=1e-5)
    if count == 1:
        assert after[legal].item() == 0


def test_a_floor_of_zero_is_no_operation_at_all() -> None:
    log_probs = torch.randn(50, 5, generator=generator())
    assert raise_to_floor(log_probs, torch.ones(50, 5, dtype=torch.bool), 0.0) is log_probs


@pytest.mark.parametrize("floor", FLOORS[1:])
def test_floors_pass_the_gradient_of_the_mixed_distribution_and_none_to_what_is_illegal(floor: float) -> None:
    """Against automatic differentiation of the plain formula in double precision, with the legal logits alone."""
    logits = (torch.randn(60, 5, generator=generator()) * 3).requires_grad_()
    legal = torch.rand(60, 5, generator=generator(1)) < 0.5
    legal[:, 2] = True
    log_probs = raise_to_floor(masked_log_softmax(logits, legal), legal, floor)
    (log_probs[:, 2].sum() + normalised_entropy(log_probs, legal).sum()).backward()
    assert logits.grad is not None
    assert (logits.grad[~legal] == 0).all()
    assert (logits.grad[legal.sum(1) == 1] == 0).all()
    for row in range(60):
        plain = logits[row].detach().double()[legal[row]].requires_grad_()
        count = len(plain)
        least = min(floor, 1 / count)
        mixed = (1 - count * least) * plain.softmax(-1) + least
        entropy = -(mixed * mixed.log()).sum() / math.log(max(count, 2))
        place = int(legal[row, :2].sum())
        (expected,) = torch.autograd.grad(mixed[place].log() + entropy, plain)
        torch.testing.assert_close(logits.grad[row][legal[row]].double(), expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("floor", [0.02, 0.2, 0.4])
def test_draws_follow_the_distribution_with_its_floor(floor: float) -> None:
    legal = torch.tensor([[True, False, True, True]]).expand(DRAWS, -1)
    logits = torch.tensor([[0.0, 9.0, 30.0, -30.0]]).expand(DRAWS, -1)
    log_probs = raise_to_floor(masked_log_softmax(logits, legal), legal, floor)
    choices = draw(log_probs, legal, torch.rand(DRAWS, generator=generator()))
    frequencies = torch.bincount(choices, minlength=4) / DRAWS
    least = min(floor, 1 / 3)
    torch.testing.assert_close(frequencies, torch.tensor([least, 0.0, 1 - 2 * least, least]), atol=5e-3, rtol=0)
    torch.testing.assert_close(gather_log_probs(log_probs[:1], torch.tensor([3])).exp(), torch.tensor([least]))
