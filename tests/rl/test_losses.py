"""The terms of the loss by hand and against TorchRL, and its gradient against one computed as plainly as possible."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from esper.control.policy import Policy, PolicySettings
from esper.control.policy.heads import gather_log_probs, masked_log_softmax
from esper.engine.observation import MaskTensors, Observation
from esper.lifecycle.actions import Head
from esper.rl.ppo import (
    PPO,
    PPOSettings,
    average_active_heads,
    average_per_head,
    bound_log_ratio,
    compute_factored_surrogate,
    compute_joint_surrogate,
    compute_value_loss,
    measure_change,
)
from esper.rl.rollout import PPOBatch, select_environments, standardise_advantages
from rl.probes import ENVIRONMENTS, STEPS, Noise, collect, ending_early, learner, plain_ppo, rollouts

T, E = 6, 4


def test_the_surrogate_stops_rewarding_ratios_beyond_the_clip_range() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    found = compute_joint_surrogate(ratio, advantage, clip=0.2, count=torch.tensor(4))
    assert found.item() == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8) / 4)
    moved = measure_change(ratio.log(), 0.2, torch.tensor(4))
    assert moved["clip_fraction"].item() == 1.0
    assert moved["deviation"].item() == pytest.approx(0.5)


def test_clipped_decisions_pass_no_gradient() -> None:
    log_prob = torch.tensor([1.5, 1.1]).log().requires_grad_()
    loss = compute_joint_surrogate(log_prob.exp(), torch.ones(2), clip=0.2, count=torch.tensor(2))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient.tolist() == pytest.approx([0, -1.1 / 2], rel=1e-6, abs=0)


def test_the_kl_estimate_is_unbiased() -> None:
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    counts = (old * 10_000).round().long()
    samples = torch.arange(3).repeat_interleave(counts)  # exactly in proportion to old
    kl = measure_change((new / old).log()[samples], 0.2, torch.tensor(10_000))["kl"]
    assert kl.item() == pytest.approx(float((old * (old / new).log()).sum()), rel=1e-3)


def test_an_absurd_probability_cannot_make_the_loss_infinite() -> None:
    log_ratio = bound_log_ratio(torch.tensor([0.0, -1e9]), torch.tensor([-1e9, 0.0]))
    found = compute_joint_surrogate(log_ratio.exp(), torch.tensor([-1.0, 1.0]), 0.2, torch.tensor(2))
    assert all(torch.isfinite(part) for part in (found, *measure_change(log_ratio, 0.2, torch.tensor(2)).values()))
    everywhere = torch.ones(1, 2, 8, dtype=torch.bool)
    ratio, advantage = log_ratio.exp().view(1, 2, 1).expand(1, 2, 8), torch.tensor([[-1.0, 1.0]])
    assert compute_factored_surrogate(ratio, advantage, 0.2, everywhere, everywhere.sum((0, 1))).isfinite()


def test_value_errors_count_in_units_of_the_scale() -> None:
    found = compute_value_loss(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor(2.0), torch.tensor(2))
    assert found.item() == 0.25


def test_the_results_of_parts_add_up_to_that_of_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    new, old, advantage = torch.randn(3, 10, generator=random)
    count, parts = torch.tensor(10), (slice(0, 7), slice(7, 10))
    log_ratio = new - old
    losses = [compute_joint_surrogate(log_ratio[part].exp(), advantage[part], 0.2, count) for part in parts]
    torch.testing.assert_close(sum(losses), compute_joint_surrogate(log_ratio.exp(), advantage, 0.2, count))
    whole = measure_change(log_ratio, 0.2, count)
    pieces = [measure_change(log_ratio[part], 0.2, count) for part in parts]
    torch.testing.assert_close(sum(piece["kl"] for piece in pieces), whole["kl"])
    torch.testing.assert_close(sum(piece["clip_fraction"] for piece in pieces), whole["clip_fraction"])
    errors = [compute_value_loss(new[part], old[part], torch.tensor(2.0), count) for part in parts]
    torch.testing.assert_close(sum(errors), compute_value_loss(new, old, torch.tensor(2.0), count))


def test_a_rare_head_weighs_as_much_as_a_frequent_one() -> None:
    is_open = torch.zeros(10, 1, 8, dtype=torch.bool)
    is_open[..., 0] = True
    is_open[0, :, 2] = True  # one occurrence in ten steps
    entropy = torch.where(is_open, 0.5, 0.0)
    entropy[0, 0, 2] = 0.9
    occurrences = is_open.sum((0, 1))
    per_head = average_per_head(entropy, is_open, occurrences)
    assert per_head[0].item() == pytest.approx(0.5)
    assert per_head[2].item() == pytest.approx(0.9)
    assert average_active_heads(per_head, occurrences).item() == pytest.approx(0.7)
    weights = torch.tensor([0.1, 9.0, 0.2, *[9.0] * 5])  # those of heads without a choice do not count
    assert average_active_heads(per_head, occurrences, weights).item() == pytest.approx((0.1 * 0.5 + 0.2 * 0.9) / 2)


def test_without_any_choice_the_bonus_is_zero() -> None:
    nothing, never = torch.zeros(4, 2, 8), torch.zeros(8, dtype=torch.int64)
    means = average_per_head(nothing, nothing.bool(), never)
    assert average_active_heads(means, never, torch.ones(8)) == average_active_heads(means, never) == 0


@pytest.mark.parametrize("active", range(1, 9))
@pytest.mark.parametrize("weight", [0.02, 0.005, 0.0123])
def test_equal_weights_change_no_bit_of_the_gradient_that_one_weight_on_the_mean_gives(
    active: int, weight: float
) -> None:
    occurrences = torch.arange(8) < active

    def gradient(bonus: Callable[[Tensor], Tensor]) -> Tensor:
        entropies = torch.rand(8, generator=torch.Generator().manual_seed(active)).requires_grad_()
        (-bonus(entropies)).backward()
        assert entropies.grad is not None
        return entropies.grad

    together = gradient(lambda entropies: weight * ((entropies * occurrences).sum() / active))
    assert torch.equal(gradient(lambda e: average_active_heads(e, occurrences, torch.full((8,), weight))), together)


class Decided(NamedTuple):
    """Random decisions of 8 heads, and in which of them each had a choice."""

    log_prob: Tensor
    old: Tensor
    advantage: Tensor
    is_open: Tensor

    @property
    def occurrences(self) -> Tensor:
        return self.is_open.sum((0, 1))

    def loss(self, time: slice = slice(None)) -> Tensor:
        ratio = (self.log_prob - self.old)[time].exp()
        return compute_factored_surrogate(ratio, self.advantage[time], 0.2, self.is_open[time], self.occurrences)


def decided(is_open: Tensor, shift: float = 0.3) -> Decided:
    """Heads without a choice have log-probability 0 in both policies, which are ``shift`` apart."""
    random = torch.Generator().manual_seed(0)
    old = torch.randn(T, E, 8, generator=random) * is_open
    log_prob = (old + shift * torch.randn(T, E, 8, generator=random) * is_open).requires_grad_()
    return Decided(log_prob, old, torch.randn(T, E, generator=random), is_open)


def gradient_of(loss: Tensor, data: Decided) -> Tensor:
    (found,) = torch.autograd.grad(loss, data.log_prob)
    return found


def test_the_factored_surrogate_of_two_decisions_worked_out_by_hand() -> None:
    """The operation has a choice in both steps, with ratios 1.5 and 1; the slot in the second, with ratio .5."""
    ratio = torch.ones(2, 1, 8)
    ratio[0, 0, Head.OP], ratio[1, 0, Head.SLOT] = 1.5, 0.5
    is_open = torch.zeros(2, 1, 8, dtype=torch.bool)
    is_open[:, :, Head.OP] = is_open[1, :, Head.SLOT] = True
    data = Decided(ratio.log().requires_grad_(), torch.zeros(2, 1, 8), torch.tensor([[1.0], [-2.0]]), is_open)
    assert data.loss().item() == pytest.approx(-((1.2 * 1 + 1 * -2) / 2 + 0.8 * -2 / 1))
    torch.testing.assert_close(data.loss(slice(1)) + data.loss(slice(1, 2)), data.loss())
    # Of the three decisions two are clipped, and heads without a choice have no gradient.
    expected = torch.zeros(2, 1, 8)
    expected[1, 0, Head.OP] = 2 / 2
    assert torch.equal(gradient_of(data.loss(), data), expected)


@pytest.mark.parametrize("head", list(Head))
def test_both_surrogates_are_the_same_where_one_head_alone_has_a_choice_in_every_step(head: Head) -> None:
    is_open = (torch.arange(8) == head).expand(T, E, 8)
    data = decided(is_open)
    ratio = (data.log_prob - data.old).sum(-1).exp()
    joint = compute_joint_surrogate(ratio, data.advantage, 0.2, torch.tensor(T * E))
    factored = data.loss()
    torch.testing.assert_close(factored, joint)
    assert torch.equal(gradient_of(factored, data), gradient_of(joint, data) * is_open)


def test_without_any_choice_the_factored_surrogate_is_zero() -> None:
    assert decided(torch.zeros(T, E, 8, dtype=torch.bool)).loss() == 0


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
    old_log_prob = gather_log_probs(old, action)

    ours = weight.clone().requires_grad_()
    log_prob = gather_log_probs(masked_log_softmax(seen @ ours.T, legal), action)
    ratio = (log_prob - old_log_prob).exp()
    loss = compute_joint_surrogate(ratio, advantage, 0.2, torch.tensor(examples))
    (gradient,) = torch.autograd.grad(loss, ours, retain_graph=True)
    # With a single head, the factored surrogate is the same.
    alone, everywhere = ratio.view(examples, 1, 1), torch.ones(examples, 1, 1, dtype=torch.bool)
    factored = compute_factored_surrogate(alone, advantage[:, None], 0.2, everywhere, torch.tensor([examples]))
    (factored_gradient,) = torch.autograd.grad(factored, ours)

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

    expected_gradient = next(p.grad for p in oracle.parameters() if p.grad is not None)
    for found, found_gradient in ((loss, gradient), (factored, factored_gradient)):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(found_gradient, expected_gradient, atol=1e-7, rtol=1e-5)
    assert math.isfinite(expected.item())


LIVELY = PolicySettings(advice=None, hidden=32, width=16, head_gain=1.0, memory=STEPS)
WEIGHTS = torch.linspace(0.01, 0.08, len(Head))
SURROGATES = ("joint", "factored")


def moved_since_acting(settings: PPOSettings, *, early: bool = False) -> tuple[PPO, PPOBatch]:
    """A learner whose policy is not quite the one that acted, so that ratios are not 1 and some are clipped."""
    student = learner(settings, sizes=LIVELY)
    (rollout,) = rollouts(student, 1)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in student.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.03)
    return student, standardise_advantages([student.make_batch(ending_early(rollout) if early else rollout)])[0]


def gradients(policy: Policy) -> dict[str, Tensor]:
    """The parameters' gradients, which are dropped."""
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


def found(student: PPO, batch: PPOBatch, settings: PPOSettings) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    measured = PPO(student.policy, settings, 0).backward([batch], WEIGHTS)
    return measured, gradients(student.policy)


def part_of(batch: PPOBatch, index: list[int]) -> PPOBatch:
    return select_environments(batch, torch.tensor(index))


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_batches_of_several_shapes_count_by_their_steps(surrogate: str) -> None:
    """Parts of one batch, given apart, have its gradient and its figures."""
    settings = plain_ppo(surrogate=surrogate)
    student, batch = moved_since_acting(settings, early=True)
    everyone = list(range(batch.rollout.environments))
    parts = [part_of(batch, everyone[:1]), part_of(batch, everyone[1:])]
    loss = PPO(student.policy, settings, 0)
    whole, its = loss.backward([batch], WEIGHTS), gradients(student.policy)
    apart, theirs = loss.backward(parts, WEIGHTS), gradients(student.policy)
    for name, gradient in its.items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-6, rtol=1e-4)
    for name, figure in whole.items():
        torch.testing.assert_close(apart[name], figure, atol=1e-6, rtol=1e-4, msg=name)


def test_advantages_are_standardised_over_all_batches_together() -> None:
    _, batch = moved_since_acting(plain_ppo(), early=True)
    everyone = list(range(batch.rollout.environments))
    parts = standardise_advantages([part_of(batch, everyone[:1]), part_of(batch, everyone[1:])])
    whole = standardise_advantages([batch])[0]
    torch.testing.assert_close(torch.cat([part.advantage for part in parts], 1), whole.advantage)


def expected(student: PPO, batch: PPOBatch, chunk: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient by the formulas, from evaluations of which each begins with the last one's detached memory."""
    rollout, policy, settings = batch.rollout, student.policy, student.settings
    state, parts = rollout.state, []
    for start in range(0, STEPS, chunk):
        time = slice(start, start + chunk)
        seen = Observation(*(part[time] for part in rollout.observations))
        masks = MaskTensors(*(part[time] for part in rollout.masks))
        parts.append(policy.evaluate(seen, masks, rollout.actions[time], state))
        state = parts[-1].state.detach()
    running = rollout.running
    chosen, value = (torch.cat([getattr(part, name) for part in parts]) for name in ("chosen_log_prob", "value"))

    def gain(log_ratio: Tensor, counted: Tensor) -> Tensor:
        ratio, advantage = log_ratio[counted].exp(), batch.advantage[counted]
        return torch.minimum(ratio * advantage, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantage).mean()

    log_ratio, is_open = chosen - rollout.chosen_log_prob, batch.is_open
    if settings.surrogate == "joint":
        loss = -gain(log_ratio.sum(-1), running)
    else:
        loss = -torch.stack([gain(log_ratio[..., head], is_open[..., head]) for head in Head]).sum()
    error = (value[running] - batch.target[running]) / policy.value_head.scale
    loss = loss + settings.value_weight * 0.5 * error.square().mean()
    entropy = torch.cat([part.entropy for part in parts])
    means = torch.stack([entropy[..., head][is_open[..., head]].mean() for head in Head])
    loss = loss - (WEIGHTS * means).mean()
    loss.backward()
    return loss.detach(), gradients(policy)


def loss_of(measured: dict[str, Tensor], settings: PPOSettings) -> Tensor:
    bonus = (WEIGHTS * measured["head_entropy"]).mean()
    return measured["policy_loss"] + settings.value_weight * measured["value_loss"] - bonus


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3, STEPS, STEPS + 7])
def test_loss_and_gradient_are_those_of_the_formulas(chunk: int, early: bool, surrogate: str) -> None:
    settings = plain_ppo(chunk=chunk, surrogate=surrogate)
    student, batch = moved_since_acting(settings, early=early)
    measured, gradient = found(student, batch, settings)
    loss, reference = expected(student, batch, chunk)
    torch.testing.assert_close(loss_of(measured, settings), loss, atol=1e-5, rtol=1e-5)
    assert_same(gradient, reference)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("early", [False, True])
def test_a_chunk_as_long_as_the_episodes_changes_no_bit(early: bool, surrogate: str) -> None:
    settings = plain_ppo(surrogate=surrogate)
    student, batch = moved_since_acting(settings, early=early)
    whole, gradient = found(student, batch, settings)
    for chunk in (STEPS, STEPS + 1):
        measured, chunked = found(student, batch, settings.model_copy(update={"chunk": chunk}))
        assert all(torch.equal(measured[name], figure) for name, figure in whole.items())
        assert all(torch.equal(chunked[name], gradient[name]) for name in gradient)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("early", [False, True])
def test_chunks_change_the_gradient_through_time_and_no_figure(early: bool, surrogate: str) -> None:
    settings = plain_ppo(surrogate=surrogate)
    student, batch = moved_since_acting(settings, early=early)
    whole, gradient = found(student, batch, settings)
    measured, chunked = found(student, batch, settings.model_copy(update={"chunk": 2}))
    assert measured.keys() == whole.keys()
    for name, figure in measured.items():
        torch.testing.assert_close(figure, whole[name], atol=1e-5, rtol=1e-5, msg=name)
    assert not torch.allclose(chunked["lstm.weight_hh_l0"], gradient["lstm.weight_hh_l0"], rtol=1e-2)


def test_minibatches_in_chunks_take_one_optimizer_step_each() -> None:
    student = learner(plain_ppo(chunk=2, epochs=2, minibatches=3, target_kl=1e6))
    assert student.update(*rollouts(student, 1), 0.0)["optimizer_steps"] == 6


class Held:
    """Bytes of activations that wait for a backward pass, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor)
        self._add(tensor.nbytes)
        weakref.finalize(box, self._add, -tensor.nbytes)
        return box

    def _add(self, amount: int) -> None:
        self.now += amount
        self.most = max(self.most, self.now)


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_only_one_chunks_activations_are_held_at_a_time() -> None:
    student = learner(plain_ppo(), sizes=LIVELY)
    batch = student.make_batch(collect(student.policy, Noise(40, ENVIRONMENTS)))

    def most(chunk: int | None) -> int:
        held = Held()
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda box: box.tensor):
            PPO(student.policy, plain_ppo(chunk=chunk), 0).backward([batch], WEIGHTS)
        assert held.now == 0
        return held.most

    assert most(4) < most(None) / 4


def test_clip_fractions_per_head_count_its_own_ratios_where_it_had_a_choice() -> None:
    settings = plain_ppo(clip=0.05)
    student, batch = moved_since_acting(settings, early=True)
    measured, _ = found(student, batch, settings)
    rollout = batch.rollout
    with torch.no_grad():
        now = student.policy.evaluate(rollout.observations, rollout.masks, rollout.actions, rollout.state)
    fractions = []
    for head in Head:
        outside = [
            abs(float((now.chosen_log_prob - rollout.chosen_log_prob)[t, e, head].exp()) - 1) > settings.clip
            for t in range(STEPS)
            for e in range(ENVIRONMENTS)
            if rollout.running[t, e] and batch.is_open[t, e, head]
        ]
        fractions.append(sum(outside) / len(outside))
    assert measured["head_clip_fraction"].tolist() == pytest.approx(fractions)
    assert len(set(fractions)) > 2
