"""The action heads: operation, then slot, then blueprint, then the details, each given the choices before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.policy.layers import RELU_GAIN, embedding, linear
from esper.control.policy.masking import legal_choices, masked_log_softmax, raised_to_floor
from esper.control.policy.settings import PolicySettings
from esper.control.spaces import MaskTensors, Observation, ObservationSpec
from esper.lifecycle.actions import RELEVANT, Head, Op, head_sizes

DETAILS = (Head.BLEND, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE)


class Candidates(NamedTuple):
    """What N rows of one head choose from."""

    preferences: Tensor
    """Log-probabilities ``[N, n]`` before they are raised to the head's floor."""
    log_probs: Tensor
    """``[N, n]``."""
    legal: Tensor
    """bool ``[N, n]``."""


Choose = Callable[[Head, Candidates], Tensor]
"""Picks choices int64 ``[N]``: drawn, greedy or given."""


class Decision(NamedTuple):
    """What was chosen in N rows and the distributions it was chosen from; tuples hold one entry per `Head`."""

    actions: Tensor
    """int64 ``[N, 8]``."""
    log_probs: tuple[Tensor, ...]
    """``[N, n]`` per head."""
    legal: tuple[Tensor, ...]
    """bool ``[N, n]`` per head."""


class Pointer(nn.Module):
    """Scores any number of candidates by a scaled dot product with a query made from the context."""

    def __init__(self, context: int, candidate: int, gain: float, generator: torch.Generator) -> None:
        super().__init__()
        self.query = linear(context, candidate, generator, gain)
        self.scale = 1.0 / math.sqrt(candidate)

    def forward(self, context: Tensor, candidates: Tensor) -> Tensor:
        """Context ``[N, C]`` and candidates ``[N, n, W]`` to logits ``[N, n]``."""
        return torch.bmm(candidates, self.query(context).unsqueeze(-1)).squeeze(-1) * self.scale


class ActionHeads(nn.Module):
    """Eight masked heads on the recurrent state and the slot tokens."""

    relevant: Tensor

    def __init__(self, spec: ObservationSpec, settings: PolicySettings, generator: torch.Generator) -> None:
        super().__init__()
        hidden, width, gain = settings.hidden, settings.width, settings.head_gain
        self.floors = settings.probability_floor.by_head
        sizes = head_sizes(1, 1)  # only SLOT and BLUEPRINT depend on the counts, and those two are pointers
        self.register_buffer("relevant", torch.from_numpy(RELEVANT.copy()), persistent=False)  # [ops, heads]
        self.op_embedding = embedding(len(Op), width, generator)
        self.blueprint_encoder = linear(spec.blueprints, width, generator, RELU_GAIN)
        self.details = linear(hidden + 3 * width, width, generator, RELU_GAIN)
        self.outputs = nn.ModuleDict(
            {
                Head.OP.name: linear(hidden, len(Op), generator, gain),
                Head.SLOT.name: Pointer(hidden + width, width, gain, generator),
                Head.BLUEPRINT.name: Pointer(hidden + width, width, gain, generator),
                **{head.name: linear(width, sizes[head], generator, gain) for head in DETAILS},
            }
        )

        op_bias = self.outputs[Head.OP.name].get_parameter("bias")
        op_bias.data.copy_(torch.tensor(settings.op_prior.by_op))

    def output_parameters(self, head: Head) -> list[nn.Parameter]:
        """The parameters that belong to this head alone."""
        return list(self.outputs[head.name].parameters())

    def forward(
        self, memory: Tensor, tokens: Tensor, observation: Observation, masks: MaskTensors, choose: Choose
    ) -> Decision:
        """Run the heads in order on ``memory`` ``[N, H]`` and ``tokens`` ``[N, S, W]``; ``choose`` picks in each."""
        rows = torch.arange(memory.shape[0], device=memory.device)
        settle = _Settling(choose, self.floors)
        op = settle(Head.OP, self.outputs[Head.OP.name](memory), masks.op)
        relevant = self.relevant[op]  # [N, heads]
        op_vector = self.op_embedding(op)

        logits = self.outputs[Head.SLOT.name](torch.cat((memory, op_vector), -1), tokens)
        slot = settle(Head.SLOT, logits, legal_choices(masks, Head.SLOT, op, op, relevant))
        token = tokens[rows, slot]

        blueprints = F.relu(self.blueprint_encoder(observation.blueprints[rows, slot]))  # [N, K, W]
        logits = self.outputs[Head.BLUEPRINT.name](torch.cat((memory, token), -1), blueprints)
        blueprint = settle(Head.BLUEPRINT, logits, legal_choices(masks, Head.BLUEPRINT, op, slot, relevant))
        blueprint_vector = blueprints[rows, blueprint] * relevant[:, Head.BLUEPRINT, None]

        details = F.relu(self.details(torch.cat((memory, op_vector, token, blueprint_vector), -1)))
        for head in DETAILS:
            settle(head, self.outputs[head.name](details), legal_choices(masks, head, op, slot, relevant))
        return settle.decision()


class _Settling:
    """Settles one head after the other and keeps what each was settled from."""

    def __init__(self, choose: Choose, floors: tuple[float, ...]) -> None:
        self._choose = choose
        self._floors = floors
        self._actions: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._legal: list[Tensor] = []

    def __call__(self, head: Head, logits: Tensor, legal: Tensor) -> Tensor:
        preferences = masked_log_softmax(logits, legal)
        log_probs = raised_to_floor(preferences, legal, self._floors[head])
        choice = self._choose(head, Candidates(preferences, log_probs, legal))
        self._actions.append(choice)
        self._log_probs.append(log_probs)
        self._legal.append(legal)
        return choice

    def decision(self) -> Decision:
        return Decision(torch.stack(self._actions, -1), tuple(self._log_probs), tuple(self._legal))
