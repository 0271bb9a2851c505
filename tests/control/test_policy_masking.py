"""Masked distributions: nothing illegal is drawn, and nothing illegal learns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from control.synthetic import generator, masks
from esper.control.policy.masking import draw, legal_choices, masked_log_softmax, normalised_entropy
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
