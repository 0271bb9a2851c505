"""The learned controller: one policy for any number of slots and blueprints, with memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.advice import Advice, read_advice
from esper.control.policy.heads import (
    ActionHeads,
    Candidates,
    Choose,
    HeadOutputs,
    draw,
    gather_log_probs,
    normalised_entropy,
    open_heads,
)
from esper.control.policy.layers import RELU_GAIN, ObservationNormaliser, RunningMoments, linear, lstm
from esper.control.policy.settings import PolicySettings
from esper.engine.observation import MaskTensors, Observation, ObservationSpec
from esper.lifecycle.actions import Head


class SlotAttention(nn.Module):
    """One pre-norm residual layer of self-attention across slots; without positions, so slots may be permuted."""

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = linear(width, 3 * width, generator)
        self.merge = linear(width, width, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[N, S, W]`` to the same."""
        rows, slots, width = tokens.shape
        projected = self.project(self.norm(tokens)).view(rows, slots, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each [N, heads, S, W / heads]
        attended = F.scaled_dot_product_attention(query, key, value)
        return tokens + self.merge(attended.transpose(1, 2).reshape(rows, slots, width))


class Encoder(nn.Module):
    """The same encoder for each slot, attention across slots, and a summary that ignores their order and number."""

    def __init__(self, spec: ObservationSpec, settings: PolicySettings, generator: torch.Generator) -> None:
        super().__init__()
        width = settings.width
        self.slot = linear(spec.slots, width, generator, RELU_GAIN)
        self.attention = SlotAttention(width, settings.attention_heads, generator)
        self.network = linear(spec.globals, width, generator, RELU_GAIN)
        self.summary_width = 3 * width

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Normalised features of N rows to tokens ``[N, S, W]`` and summary ``[N, 3 W]``."""
        tokens = self.attention(F.relu(self.slot(observation.slots)))
        network = F.relu(self.network(observation.globals))
        return tokens, torch.cat((network, tokens.mean(1), tokens.amax(1)), -1)


RETURN_FLOOR = 1e-3
"""Least standard deviation of returns, so that constant returns do not blow up the value's scale."""


class ValueHead(nn.Module):
    """V(s) from the recurrent state. Outside this class values are always in the units of returns."""

    def __init__(self, hidden: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.body = linear(hidden, width, generator, RELU_GAIN)
        self.output = linear(width, 1, generator)
        self.returns = RunningMoments(1, RETURN_FLOOR)

    @property
    def scale(self) -> Tensor:
        """Standard deviation of returns, 0-d: divide value errors by it to have them in standardised units."""
        return self.returns.deviation[0].to(self.output.weight.dtype)

    def forward(self, memory: Tensor) -> Tensor:
        """``[*, H]`` to values ``[*]`` in units of returns, float32 whatever the precision of the layers."""
        standard = self.output(F.relu(self.body(memory))).squeeze(-1).float()
        return standard * self.scale + self.returns.mean[0].to(standard.dtype)

    @torch.no_grad()
    def rescale(self, returns: Tensor) -> None:
        """Merge new returns, any shape, and correct the last layer so that no prediction changes.

        This is the output-preserving step of PopArt (van Hasselt et al., 2016).
        """
        old_mean, old_deviation = self.returns.mean.clone(), self.returns.deviation
        self.returns.update(returns.reshape(-1, 1))
        mean, deviation = self.returns.mean, self.returns.deviation
        weight, bias = self.output.weight, self.output.bias
        weight.mul_((old_deviation / deviation).to(weight.dtype))
        bias.copy_(((old_deviation * bias + old_mean - mean) / deviation).to(bias.dtype))


class PolicyState(NamedTuple):
    """The memory of E controllers: LSTM output and cell, each ``[1, E, H]``."""

    output: Tensor
    cell: Tensor

    def to(self, device: torch.device) -> PolicyState:
        """The same memory on ``device``."""
        return PolicyState(self.output.to(device), self.cell.to(device))

    def detach(self) -> PolicyState:
        """The same memory, through which no gradient flows back."""
        return PolicyState(self.output.detach(), self.cell.detach())


class PolicyStep(NamedTuple):
    """One decision for each of E environments."""

    actions: Tensor
    """int64 ``[E, 8]``, irrelevant heads 0."""
    chosen_log_prob: Tensor
    """``[E, 8]`` of what each head chose; exactly 0 where the head is irrelevant."""
    value: Tensor
    """``[E]`` in units of returns."""
    state: PolicyState
    """Pass it to the next step."""
    head_log_probs: tuple[Tensor, ...]
    """``[E, n]`` per head: the distributions that were drawn from."""

    def to_cpu(self) -> PolicyStep:
        """The same on the CPU, by a single transfer; the memory stays where it is."""
        # Choices are small whole numbers, which are exact in any precision.
        parts = (self.actions.to(self.value.dtype), self.chosen_log_prob, self.value[:, None], *self.head_log_probs)
        widths = [part.shape[-1] for part in parts]
        here: Sequence[Tensor] = torch.split(torch.cat(parts, -1).cpu(), widths, dim=-1)
        return PolicyStep(here[0].long(), here[1], here[2].squeeze(-1), self.state, tuple(here[3:]))

    @property
    def log_prob(self) -> Tensor:
        """``[E]`` of the whole action."""
        return self.chosen_log_prob.sum(-1)


class PolicyEvaluation(NamedTuple):
    """What the policy now thinks of T steps of E environments."""

    chosen_log_prob: Tensor
    """``[T, E, 8]`` of what each head chose; exactly 0 where the head is irrelevant."""
    entropy: Tensor
    """``[T, E, 8]`` per head, over log(number of legal choices); 0 where the head is irrelevant or had one choice."""
    value: Tensor
    """``[T, E]`` in units of returns."""
    state: PolicyState
    """The memory after the last step."""

    @property
    def log_prob(self) -> Tensor:
        """``[T, E]`` of the whole action."""
        return self.chosen_log_prob.sum(-1)


class Policy(nn.Module):
    """Slot-token encoder, LSTM, autoregressive masked heads and a state value.

    Observations are given raw: the policy standardises them with statistics of its own, which change only in
    `recalibrate`. ``spec`` counts their features; where the settings have the policy advised, the last ones are those
    that `esper.control.advice.advise` adds.
    """

    def __init__(self, spec: ObservationSpec, settings: PolicySettings, generator: torch.Generator) -> None:
        super().__init__()
        self.spec = spec
        self.settings = settings
        self.normaliser = ObservationNormaliser(spec)
        self.encoder = Encoder(spec, settings, generator)
        self.lstm = lstm(self.encoder.summary_width, settings.hidden, settings.memory, generator)
        self.heads = ActionHeads(spec, settings, generator)
        self.value_head = ValueHead(settings.hidden, settings.width, generator)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.value_head.output.weight.device

    def initial_state(self, environments: int) -> PolicyState:
        """Empty memory for that many environments."""
        zeros = torch.zeros(1, environments, self.settings.hidden, device=self.device)
        return PolicyState(zeros, zeros)

    @torch.no_grad()
    def act(
        self, observation: Observation, masks: MaskTensors, state: PolicyState, noise: Tensor | None = None
    ) -> PolicyStep:
        """Choose one action per environment.

        ``noise`` ``[E, 8]`` holds a uniform number in [0, 1] per environment and head, so that what environment i
        draws depends on its own random stream and on nothing else. Without noise each head takes the choice
        that is likeliest before probabilities are raised to their floors.
        """
        tokens, memory, state, normalised = self._remember(observation, state)
        choose = _choose_likeliest if noise is None else _choose_by_noise(noise)
        decision = self.heads(memory, tokens, normalised, self._advice(observation), masks, choose)
        return PolicyStep(
            decision.actions,
            _gather_chosen(decision),
            self.value_head(memory),
            state,
            head_log_probs=decision.log_probs,
        )

    @torch.no_grad()
    def value(self, observation: Observation, state: PolicyState) -> Tensor:
        """V ``[E]`` of an observation reached with the memory ``state``, to bootstrap a rollout that was cut."""
        _, memory, _, _ = self._remember(observation, state)
        return self.value_head(memory)

    def evaluate(
        self, observations: Observation, masks: MaskTensors, actions: Tensor, state: PolicyState
    ) -> PolicyEvaluation:
        """Log-probabilities, entropies and values of stored decisions ``[T, E, ...]``, from the ``state`` at step 0."""
        steps, environments = actions.shape[:2]
        flat = Observation(*(part.flatten(0, 1) for part in observations))
        flat_masks = MaskTensors(*(part.flatten(0, 1) for part in masks))
        flat_actions = actions.flatten(0, 1)
        normalised = self.normaliser(flat)
        tokens, summary = self.encoder(normalised)
        memory, following = self._recur(summary.view(steps, environments, -1), state)
        choose = _choose_given(flat_actions)
        decision = self.heads(memory.flatten(0, 1), tokens, normalised, self._advice(flat), flat_masks, choose)
        entropy = [normalised_entropy(p, legal) for p, legal in zip(decision.log_probs, decision.legal, strict=True)]
        return PolicyEvaluation(
            chosen_log_prob=_gather_chosen(decision).view(steps, environments, len(Head)),
            entropy=torch.stack(entropy, -1).view(steps, environments, len(Head)),
            value=self.value_head(memory),
            state=following,
        )

    def open_heads(self, masks: MaskTensors, actions: Tensor) -> Tensor:
        """Which heads had a choice, bool ``[T, E, 8]``, in stored decisions ``[T, E, ...]``."""
        flat = MaskTensors(*(part.flatten(0, 1) for part in masks))
        return open_heads(flat, actions.flatten(0, 1), self.heads.relevant).view(actions.shape)

    def recalibrate(self, observations: Sequence[Observation], returns: Tensor) -> None:
        """Merge raw observations and returns into the policy's statistics: once, after learning from them."""
        self.normaliser.update(*observations)
        self.value_head.rescale(returns)

    def _advice(self, observation: Observation) -> Advice | None:
        """What a raw observation says that a rule would do, where the policy is advised."""
        return None if self.settings.advice is None else read_advice(observation)

    def _remember(
        self, observation: Observation, state: PolicyState
    ) -> tuple[Tensor, Tensor, PolicyState, Observation]:
        """Tokens ``[E, S, W]``, LSTM output ``[E, H]``, the next state and the normalised observation."""
        normalised = self.normaliser(observation)
        tokens, summary = self.encoder(normalised)
        memory, following = self._recur(summary.unsqueeze(0), state)
        return tokens, memory.squeeze(0), following, normalised

    def _recur(self, summary: Tensor, state: PolicyState) -> tuple[Tensor, PolicyState]:
        """LSTM outputs ``[T, E, H]`` and the state after the last.

        Always in float32: errors add up over the steps, and autocast runs cuDNN's LSTM in float16 whatever it is
        asked for.
        """
        with torch.autocast(summary.device.type, enabled=False):
            memory, following = self.lstm(summary.float(), (state.output, state.cell))
        return memory, PolicyState(*following)


def _gather_chosen(decision: HeadOutputs) -> Tensor:
    """Log-probabilities ``[N, 8]`` of what was chosen; those of irrelevant heads are exactly 0."""
    per_head = [gather_log_probs(p, decision.actions[:, head]) for head, p in enumerate(decision.log_probs)]
    return torch.stack(per_head, -1)


def _choose_likeliest(head: Head, candidates: Candidates) -> Tensor:  # noqa: ARG001
    return candidates.preferences.argmax(-1)


def _choose_by_noise(noise: Tensor) -> Choose:
    return lambda head, candidates: draw(candidates.log_probs, candidates.legal, noise[:, head])


def _choose_given(actions: Tensor) -> Choose:
    return lambda head, candidates: actions[:, head]  # noqa: ARG005
