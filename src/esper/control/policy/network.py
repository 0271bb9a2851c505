"""The recurrent policy: encoder, LSTM, action heads and value, for any number of slots and blueprints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.advice import Advice, read_advice
from esper.control.policy.heads import (
    RELU_GAIN,
    ActionHeads,
    Candidates,
    HeadOutputs,
    ObservationNormaliser,
    RunningMoments,
    compute_normalised_entropy,
    find_open_heads,
    gather_log_probs,
    make_linear,
    make_lstm,
    sample_choices,
)
from esper.control.policy.settings import PolicySettings
from esper.engine.observation import MaskTensors, Observation, ObservationSpec
from esper.errors import ConfigError
from esper.lifecycle.actions import Head


class SlotAttention(nn.Module):
    """One pre-norm residual layer of self-attention across slots; without positions, so slots may be permuted."""

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = make_linear(width, 3 * width, generator)
        self.merge = make_linear(width, width, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Slot tokens ``[N, S, W]`` to tokens of the same shape."""
        rows, slots, width = tokens.shape
        projected = self.project(self.norm(tokens)).view(rows, slots, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each [N, heads, S, W / heads]
        attended = F.scaled_dot_product_attention(query, key, value)
        return tokens + self.merge(attended.transpose(1, 2).reshape(rows, slots, width))


class Encoder(nn.Module):
    """One encoder for all slots, attention across slots, and a summary independent of their order and number."""

    def __init__(self, spec: ObservationSpec, settings: PolicySettings, generator: torch.Generator) -> None:
        super().__init__()
        width = settings.width
        self.slot = make_linear(spec.slots, width, generator, RELU_GAIN)
        self.attention = SlotAttention(width, settings.attention_heads, generator)
        self.network = make_linear(spec.globals, width, generator, RELU_GAIN)
        self.summary_width = 3 * width

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Normalised features of N rows to tokens ``[N, S, W]`` and summary ``[N, 3 W]``."""
        tokens = self.attention(F.relu(self.slot(observation.slots)))
        network = F.relu(self.network(observation.globals))
        return tokens, torch.cat((network, tokens.mean(1), tokens.amax(1)), -1)


RETURN_FLOOR = 1e-3
"""Least standard deviation of returns, so that constant returns do not blow up the value's scale."""


class ValueHead(nn.Module):
    """V(s) from the recurrent state, in the units of returns."""

    def __init__(self, hidden: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.body = make_linear(hidden, width, generator, RELU_GAIN)
        self.output = make_linear(width, 1, generator)
        self.returns = RunningMoments(1, RETURN_FLOOR)

    @property
    def scale(self) -> Tensor:
        """Standard deviation of returns, 0-d: value errors divided by it are in standardised units."""
        return self.returns.deviation[0].to(self.output.weight.dtype)

    def forward(self, memory: Tensor) -> Tensor:
        """``[*, H]`` to values ``[*]`` in units of returns, float32 whatever the precision of the layers."""
        standard = self.output(F.relu(self.body(memory))).squeeze(-1).float()
        return standard * self.scale + self.returns.mean[0].to(standard.dtype)

    @torch.no_grad()
    def update_scale(self, returns: Tensor) -> None:
        """Merge new returns, any shape, into the scale, and correct the last layer so that no prediction changes.

        The output-preserving step of PopArt (van Hasselt et al., 2016).
        """
        # y = w h + b in standardised units; new moments must leave y * deviation + mean unchanged.
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
        """The memory on ``device``."""
        return PolicyState(self.output.to(device), self.cell.to(device))

    def detach(self) -> PolicyState:
        """The memory, cut off from the graph."""
        return PolicyState(self.output.detach(), self.cell.detach())


class PolicyStep(NamedTuple):
    """One decision of the policy for each of E environments."""

    actions: Tensor
    """int64 ``[E, 8]``, irrelevant heads 0."""
    chosen_log_prob: Tensor
    """Log-probabilities ``[E, 8]`` of the choices; exactly 0 where a head is irrelevant."""
    value: Tensor
    """Values ``[E]`` in units of returns."""
    state: PolicyState
    """The memory for the next step."""
    head_log_probs: tuple[Tensor, ...]
    """``[E, n]`` per head: the distributions of the choices."""

    def to_cpu(self) -> PolicyStep:
        """The step on the CPU, by a single transfer; the memory stays where it is."""
        # Choices are small integers, which are exact in any precision.
        parts = (self.actions.to(self.value.dtype), self.chosen_log_prob, self.value[:, None], *self.head_log_probs)
        widths = [part.shape[-1] for part in parts]
        columns: Sequence[Tensor] = torch.split(torch.cat(parts, -1).cpu(), widths, dim=-1)
        actions, chosen, value, *heads = columns
        return PolicyStep(actions.long(), chosen, value.squeeze(-1), self.state, tuple(heads))

    @property
    def log_prob(self) -> Tensor:
        """Log-probability ``[E]`` of the whole action."""
        return self.chosen_log_prob.sum(-1)


class PolicyEvaluation(NamedTuple):
    """The policy's present distributions and values for T stored steps of E environments."""

    chosen_log_prob: Tensor
    """Log-probabilities ``[T, E, 8]`` of the choices; exactly 0 where a head is irrelevant."""
    entropy: Tensor
    """``[T, E, 8]`` per head, divided by log(number of legal choices); 0 where a head is irrelevant or had one."""
    value: Tensor
    """Values ``[T, E]`` in units of returns."""
    state: PolicyState
    """The memory after the last step."""

    @property
    def log_prob(self) -> Tensor:
        """Log-probabilities ``[T, E]`` of the whole actions."""
        return self.chosen_log_prob.sum(-1)


class Policy(nn.Module):
    """Slot-token encoder, LSTM, autoregressive masked heads and a state value.

    Observations are raw: the policy standardises them with its own statistics, which only `update_statistics` changes.
    ``spec`` counts their features. If the settings have advice, the last features are those of
    `esper.control.advice.append_advice`. The heads ``closed`` have no parameters (`Rules.closed_heads`).
    """

    def __init__(
        self,
        spec: ObservationSpec,
        settings: PolicySettings,
        generator: torch.Generator,
        closed: frozenset[Head] = frozenset(),
    ) -> None:
        super().__init__()
        self.spec = spec
        self.settings = settings
        self.normaliser = ObservationNormaliser(spec)
        self.encoder = Encoder(spec, settings, generator)
        self.lstm = make_lstm(self.encoder.summary_width, settings.hidden, settings.memory, generator)
        self.heads = ActionHeads(spec, settings, closed, generator)
        self.value_head = ValueHead(settings.hidden, settings.width, generator)

    def drop_closed_heads(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's ``tensors`` without those of closed heads, which older versions saved."""
        closed = [f"heads.outputs.{head.name}." for head in Head if head not in self.heads.present]
        if self.heads.details is None:
            closed.append("heads.details.")
        return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in closed)}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
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

        ``noise`` ``[E, 8]``: a uniform number in [0, 1] per environment and head. Without noise each head takes the
        likeliest choice, regardless of probability floors.
        """

        def choose(head: Head, candidates: Candidates) -> Tensor:
            if noise is None:
                return candidates.preferences.argmax(-1)
            return sample_choices(candidates.log_probs, candidates.legal, noise[:, head])

        tokens, memory, state, normalised = self._encode_step(observation, state)
        decision = self.heads(memory, tokens, normalised, self._read_advice(observation), masks, choose)
        return PolicyStep(
            decision.actions,
            _gather_chosen(decision),
            self.value_head(memory),
            state,
            head_log_probs=decision.log_probs,
        )

    @torch.no_grad()
    def value(self, observation: Observation, state: PolicyState) -> Tensor:
        """V ``[E]`` of an observation, given the memory before it; bootstraps a rollout that was cut."""
        _, memory, _, _ = self._encode_step(observation, state)
        return self.value_head(memory)

    def evaluate(
        self, observations: Observation, masks: MaskTensors, actions: Tensor, state: PolicyState
    ) -> PolicyEvaluation:
        """Log-probabilities, entropies and values of stored decisions ``[T, E, ...]``, from the ``state`` at step 0."""
        steps, environments = actions.shape[:2]

        # All but the LSTM works on ``[T * E]`` rows.
        flat = Observation(*(part.flatten(0, 1) for part in observations))
        flat_masks = MaskTensors(*(part.flatten(0, 1) for part in masks))
        flat_actions = actions.flatten(0, 1)
        normalised = self.normaliser(flat)
        tokens, summary = self.encoder(normalised)
        memory, last_state = self._run_lstm(summary.view(steps, environments, -1), state)

        def choose(head: Head, candidates: Candidates) -> Tensor:  # noqa: ARG001
            return flat_actions[:, head]

        decision = self.heads(memory.flatten(0, 1), tokens, normalised, self._read_advice(flat), flat_masks, choose)
        entropy = [
            compute_normalised_entropy(p, legal) for p, legal in zip(decision.log_probs, decision.legal, strict=True)
        ]
        return PolicyEvaluation(
            chosen_log_prob=_gather_chosen(decision).view(steps, environments, len(Head)),
            entropy=torch.stack(entropy, -1).view(steps, environments, len(Head)),
            value=self.value_head(memory),
            state=last_state,
        )

    def find_open_heads(self, masks: MaskTensors, actions: Tensor) -> Tensor:
        """The heads with more than one legal choice, bool ``[T, E, 8]``, in stored decisions ``[T, E, ...]``."""
        flat = MaskTensors(*(part.flatten(0, 1) for part in masks))
        return find_open_heads(flat, actions.flatten(0, 1), self.heads.relevant).view(actions.shape)

    def update_statistics(self, observations: Sequence[Observation], returns: Tensor) -> None:
        """Merge raw observations and returns into the policy's statistics; call it once, after learning from them."""
        self.normaliser.update(*observations)
        self.value_head.update_scale(returns)

    def _read_advice(self, observation: Observation) -> Advice | None:
        return None if self.settings.advice is None else read_advice(observation)

    def _encode_step(
        self, observation: Observation, state: PolicyState
    ) -> tuple[Tensor, Tensor, PolicyState, Observation]:
        """Tokens ``[E, S, W]``, LSTM output ``[E, H]``, the next state and the normalised observation."""
        normalised = self.normaliser(observation)
        tokens, summary = self.encoder(normalised)
        memory, next_state = self._run_lstm(summary.unsqueeze(0), state)
        return tokens, memory.squeeze(0), next_state, normalised

    def _run_lstm(self, summary: Tensor, state: PolicyState) -> tuple[Tensor, PolicyState]:
        """LSTM outputs ``[T, E, H]`` and the state after the last step."""
        fitting = (1, summary.shape[1], self.settings.hidden)
        if state.output.shape != fitting or state.cell.shape != fitting:
            raise ConfigError(
                f"the memory is {list(state.output.shape)} where {list(fitting)} fits: it is from another policy than "
                f"this one, with policy.hidden {self.settings.hidden}, or of other environments"
            )
        # In float32: errors add up over the steps, and autocast would run cuDNN's LSTM in float16 whatever its dtype.
        with torch.autocast(summary.device.type, enabled=False):
            memory, last_state = self.lstm(summary.float(), (state.output, state.cell))
        return memory, PolicyState(*last_state)


def _gather_chosen(decision: HeadOutputs) -> Tensor:
    """Log-probabilities ``[N, 8]`` of the chosen actions; those of irrelevant heads are exactly 0."""
    per_head = [gather_log_probs(p, decision.actions[:, head]) for head, p in enumerate(decision.log_probs)]
    return torch.stack(per_head, -1)
