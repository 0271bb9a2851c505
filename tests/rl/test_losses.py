"""The terms of the loss against values worked out by hand and against TorchRL."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from esper.control.policy.masking import chosen, masked_log_softmax
from esper.rl.losses import clipped_surrogate, entropy_bonus, head_means, outside_clip_range, value_loss


def test_the_surrogate_stops_rewarding_ratios_beyond_the_clip_range() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    found = clipped_surrogate(ratio, torch.zeros(4), advantage, clip=0.2, count=torch.tensor(4))
    assert found.loss.item() == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8) / 4)
    assert found.clipped.item() == 1.0
    assert found.deviation.item() == pytest.approx(0.5)


def test_clipped_decisions_pass_no_gradient() -> None:
    log_prob = torch.tensor([1.5, 1.1]).log().requires_grad_()
    clipped_surrogate(log_prob, torch.zeros(2), torch.ones(2), clip=0.2, count=torch.tensor(2)).loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad[0] == 0
    assert log_prob.grad[1] < 0


def test_the_kl_estimate_is_unbiased() -> None:
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    counts = (old * 10_000).round().long()
    samples = torch.arange(3).repeat_interleave(counts)  # exactly in proportion to old
    count = torch.tensor(10_000)
    kl = clipped_surrogate(new.log()[samples], old.log()[samples], torch.zeros(10_000), 0.2, count).kl
    assert kl.item() == pytest.approx(float((old * (old / new).log()).sum()), rel=1e-3)


def test_an_absurd_probability_cannot_make_the_loss_infinite() -> None:
    new, old = torch.tensor([0.0, -1e9]), torch.tensor([-1e9, 0.0])
    found = clipped_surrogate(new, old, torch.tensor([-1.0, 1.0]), 0.2, torch.tensor(2))
    assert all(torch.isfinite(part) for part in found)


def test_value_errors_count_in_units_of_the_scale() -> None:
    found = value_loss(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor(2.0), torch.tensor(2))
    assert found.item() == 0.25


def test_the_results_of_parts_add_up_to_that_of_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    new, old, advantage = torch.randn(3, 10, generator=random)
    count, parts = torch.tensor(10), (slice(0, 7), slice(7, 10))
    whole = clipped_surrogate(new, old, advantage, 0.2, count)
    pieces = [clipped_surrogate(new[part], old[part], advantage[part], 0.2, count) for part in parts]
    torch.testing.assert_close(sum(piece.loss for piece in pieces), whole.loss)
    torch.testing.assert_close(sum(piece.kl for piece in pieces), whole.kl)
    torch.testing.assert_close(sum(piece.clipped for piece in pieces), whole.clipped)
    errors = [value_loss(new[part], old[part], torch.tensor(2.0), count) for part in parts]
    torch.testing.assert_close(sum(errors), value_loss(new, old, torch.tensor(2.0), count))


def test_a_head_is_outside_the_clip_range_by_its_own_ratio() -> None:
    ratio = torch.tensor([0.79, 0.81, 1.0, 1.19, 1.21, 1e9])
    assert outside_clip_range(ratio.log(), torch.zeros(6), 0.2).tolist() == [True, False, False, False, True, True]


def test_a_rare_head_weighs_as_much_as_a_frequent_one() -> None:
    is_open = torch.zeros(10, 1, 8, dtype=torch.bool)
    is_open[..., 0] = True
    is_open[0, :, 2] = True  # one occurrence in ten steps
    entropy = torch.where(is_open, 0.5, 0.0)
    entropy[0, 0, 2] = 0.9
    occurrences = is_open.sum((0, 1))
    per_head = head_means(entropy, is_open, occurrences)
    assert per_head[0].item() == pytest.approx(0.5)
    assert per_head[2].item() == pytest.approx(0.9)
    assert entropy_bonus(per_head, occurrences).item() == pytest.approx(0.7)


def test_without_any_choice_the_bonus_is_zero() -> None:
    nothing, never = torch.zeros(4, 2, 8), torch.zeros(8, dtype=torch.int64)
    assert entropy_bonus(head_means(nothing, nothing.bool(), never), never) == 0


def test_torchrl_computes_the_same_masked_clip_loss_and_gradient() -> None:
    tensordict = pytest.importorskip("tensordict")
    modules = pytest.importorskip("torchrl.modules")
    objectives = pytest.importorskip("torchrl.objectives")
    random = torch.Generator().manual_seed(0)
    examples, features, choices = 64, 5, 4
    seen = torch.randn(examples, features, generator=random)
    legal = torch.rand(examples, choices, generator=random) < 0.6
    legal[:, 1] = True
    advantage = torch.randn(examples, generator=random)
    weight = torch.randn(choices, features, generator=random)
    old = masked_log_softmax(seen @ (weight * 0.7).T, legal)
    action = (old.exp().cumsum(-1) > torch.rand(examples, 1, generator=random)).int().argmax(-1)
    old_log_prob = chosen(old, action)

    ours = weight.clone().requires_grad_()
    log_prob = chosen(masked_log_softmax(seen @ ours.T, legal), action)
    loss = clipped_surrogate(log_prob, old_log_prob, advantage, 0.2, torch.tensor(examples))
    loss.loss.backward()

    layer = nn.Linear(features, choices, bias=False)
    layer.weight.data.copy_(weight)
    actor = modules.ProbabilisticActor(
        tensordict.nn.TensorDictModule(layer, in_keys=["observation"], out_keys=["logits"]),
        in_keys={"logits": "logits", "mask": "mask"},
        distribution_class=modules.MaskedCategorical,
        return_log_prob=True,
    )
    oracle = objectives.ClipPPOLoss(actor, None, clip_epsilon=0.2, entropy_bonus=False, normalize_advantage=False)
    data = tensordict.TensorDict(
        {
            "observation": seen,
            "mask": legal,
            "action": action,
            oracle.tensor_keys.sample_log_prob: old_log_prob,
            "advantage": advantage[:, None],
        },
        [examples],
    )
    expected = oracle(data)["loss_objective"]
    expected.backward()

    torch.testing.assert_close(loss.loss, expected)
    gradient = next(p.grad for p in oracle.parameters() if p.grad is not None)
    torch.testing.assert_close(ours.grad, gradient, atol=1e-7, rtol=1e-5)
    assert math.isfinite(expected.item())
