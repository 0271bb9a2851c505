"""The loss's gradient, chunk by chunk, against one computed all at once and as plainly as possible."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from esper.control.observation import MaskTensors, Observation
from esper.control.policy import Policy, PolicySettings
from esper.lifecycle.actions import Head
from esper.rl.batch import Batch
from esper.rl.objective import Measured, Objective
from esper.rl.ppo import Learner
from esper.rl.settings import PPOSettings
from rl.noise import ENVIRONMENTS, STEPS, Noise, ending_early, rollouts
from rl.plain_ppo import plain_ppo
from rl.probes import collect, learner

LIVELY = PolicySettings(hidden=32, width=16, head_gain=1.0, memory=STEPS)
WEIGHTS = torch.linspace(0.01, 0.08, len(Head))
SURROGATES = ("joint", "factored")


def moved_since_acting(settings: PPOSettings, *, early: bool = False) -> tuple[Learner, Batch]:
    """A learner whose policy is not quite the one that acted, so that ratios are not 1 and some are clipped."""
    student = learner(settings, sizes=LIVELY)
    (rollout,) = rollouts(student, 1)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in student.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.03)
    return student, student.batch(ending_early(rollout) if early else rollout).standardised()


def gradients(policy: Policy) -> dict[str, Tensor]:
    """The parameters' gradients, which are dropped."""
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


def found(student: Learner, batch: Batch, settings: PPOSettings) -> tuple[Measured, dict[str, Tensor]]:
    measured = Objective(student.policy, settings).backward(batch, WEIGHTS)
    return measured, gradients(student.policy)


def expected(student: Learner, batch: Batch, chunk: int) -> tuple[Tensor, dict[str, Tensor]]:
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


def loss_of(measured: Measured, settings: PPOSettings) -> Tensor:
    bonus = (WEIGHTS * measured.head_entropy).mean()
    return measured.policy_loss + settings.value_weight * measured.value_loss - bonus


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
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(measured, whole, strict=True))
        assert all(torch.equal(chunked[name], gradient[name]) for name in gradient)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("early", [False, True])
def test_chunks_change_the_gradient_through_time_and_no_figure(early: bool, surrogate: str) -> None:
    settings = plain_ppo(surrogate=surrogate)
    student, batch = moved_since_acting(settings, early=early)
    whole, gradient = found(student, batch, settings)
    measured, chunked = found(student, batch, settings.model_copy(update={"chunk": 2}))
    for name, ours, theirs in zip(Measured._fields, measured, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=name)
    assert not torch.allclose(chunked["lstm.weight_hh_l0"], gradient["lstm.weight_hh_l0"], rtol=1e-2)


def test_minibatches_in_chunks_take_one_optimizer_step_each() -> None:
    student = learner(plain_ppo(chunk=2, epochs=2, minibatches=3, target_kl=1e6))
    assert student.update(*rollouts(student, 1), 0.0).optimizer_steps == 6


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
    batch = student.batch(collect(student.policy, Noise(40, ENVIRONMENTS)))

    def most(chunk: int | None) -> int:
        held = Held()
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda box: box.tensor):
            Objective(student.policy, plain_ppo(chunk=chunk)).backward(batch, WEIGHTS)
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
    assert measured.head_clip_fraction.tolist() == pytest.approx(fractions)
    assert len(set(fractions)) > 2
