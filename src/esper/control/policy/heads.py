"""The action heads: operation, then slot, then blueprint, then the details, each given the choices before it.

A masked choice has probability exactly 0 and passes zero gradient to its logit. A head that is irrelevant to the chosen
operation has the one legal choice 0: its log-probability, entropy and gradient are exactly 0. Summing over all heads is
therefore the same as summing over the relevant ones.

The layers come first: they are initialised from an explicit generator. Observations are normalised inside the forward
pass, by running moments that only an update changes, so that an update computes with exactly the inputs of acting.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.advice import Advice
from esper.control.policy.settings import PolicySettings
from esper.engine.observation import MaskTensors, Observation, ObservationSpec
from esper.lifecycle.actions import RELEVANT, Head, Op, count_choices

RELU_GAIN = math.sqrt(2.0)


def make_linear(inputs: int, outputs: int, generator: torch.Generator, gain: float = 1.0) -> nn.Linear:
    """A linear layer with an orthogonal weight times ``gain`` (Saxe et al., 2014) and zero bias."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def make_embedding(count: int, width: int, generator: torch.Generator) -> nn.Embedding:
    """A table of ``count`` standard-normal vectors."""
    table = nn.Embedding(count, width, device="meta").to_empty(device="cpu")
    nn.init.normal_(table.weight, generator=generator)
    return table


def make_lstm(inputs: int, hidden: int, memory: int, generator: torch.Generator) -> nn.LSTM:
    """A one-layer LSTM, orthogonal per gate, whose gates start with time constants spread over 1..``memory`` steps.

    Forget biases are log(u) with u uniform in [1, memory - 1] and input biases their negatives: the chrono
    initialisation of Tallec and Ollivier (2018). A unit then forgets at a rate of about 1/u per step.
    """
    layer = nn.LSTM(inputs, hidden, device="meta").to_empty(device="cpu")
    # Each of the four gates gets an orthogonal matrix of its own.
    weights = dict(layer.named_parameters())
    for name in ("weight_ih_l0", "weight_hh_l0"):
        for gate in weights[name].detach().chunk(4):
            nn.init.orthogonal_(gate, generator=generator)
    for name in ("bias_ih_l0", "bias_hh_l0"):
        nn.init.zeros_(weights[name])
    # Forget gates by time constants; input gates complement them.
    input_bias, forget_bias, _, _ = weights["bias_ih_l0"].detach().chunk(4)  # torch's order of the gates
    forget_bias.uniform_(1.0, max(2.0, memory - 1.0), generator=generator).log_()
    input_bias.copy_(-forget_bias)
    return layer


WINDOW = 100
"""Least weight of a new batch is 1/WINDOW, so that the statistics follow a policy that changes."""

OBSERVATION_FLOOR = 0.01
"""Least standard deviation of a feature, so that one that was constant so far cannot explode."""

OBSERVATION_BOUND = 5.0
"""Normalised features are clipped to this many standard deviations."""
NO_VARIANCE = 1e-12
"""Upper bound of the variance that rounding leaves of equal numbers."""


NON_NEGATIVE = ("count", "variance")
"""Buffers of `RunningMoments` that are never below 0."""


class RunningMoments(nn.Module):
    """Mean and variance of vectors ``[*, F]``, merged batch by batch (Chan, Golub and LeVeque, 1979), in float64.

    Before the first batch the mean is 0 and the variance 1.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, features: int, floor: float) -> None:
        super().__init__()
        self.floor = floor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(features, dtype=torch.float64))

    @property
    def deviation(self) -> Tensor:
        """Standard deviation ``[F]``, never below the floor."""
        return self.variance.sqrt().clamp(min=self.floor)

    @property
    def varied(self) -> Tensor:
        """Whether features have varied, bool ``[F]``; all have, before the first batch."""
        return self.variance > NO_VARIANCE

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Merge a batch ``[*, F]`` into the moments."""
        rows = values.reshape(-1, self.mean.shape[0]).double()
        incoming = rows.shape[0]
        mean = rows.mean(0)
        variance = rows.var(0, correction=0)
        # The old count is capped, so that old batches fade.
        count = self.count.clamp(max=incoming * (WINDOW - 1))
        share = incoming / (count + incoming)
        delta = mean - self.mean
        self.variance.copy_((1 - share) * self.variance + share * variance + share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.copy_(count + incoming)


class ObservationNormaliser(nn.Module):
    """Standardises every feature of an observation over environments, steps, slots and blueprints.

    A feature that never varied, or has not for thousands of updates, reads 0: a policy has not learned what another
    value means.
    """

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__()
        self.globals = RunningMoments(spec.globals, OBSERVATION_FLOOR)
        self.slots = RunningMoments(spec.slots, OBSERVATION_FLOOR)
        self.blueprints = RunningMoments(spec.blueprints, OBSERVATION_FLOOR)

    def forward(self, observation: Observation) -> Observation:
        return Observation(
            _standardise(observation.globals, self.globals),
            _standardise(observation.slots, self.slots),
            _standardise(observation.blueprints, self.blueprints),
        )

    def update(self, *observations: Observation) -> None:
        """Merge raw observations, any leading shapes and numbers of slots and blueprints, as one batch."""
        for moments, parts in zip(
            (self.globals, self.slots, self.blueprints), zip(*observations, strict=True), strict=True
        ):
            moments.update(torch.cat([part.flatten(0, -2) for part in parts]))


def _standardise(values: Tensor, moments: RunningMoments) -> Tensor:
    standard = (values - moments.mean.to(values.dtype)) / moments.deviation.to(values.dtype)
    return standard.clamp(-OBSERVATION_BOUND, OBSERVATION_BOUND) * moments.varied


ILLEGAL_LOGIT = -1e9
"""Finite, so that 0 * log(0) is 0; so low that its exponential is exactly 0."""

LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 below 1: a float64 uniform may round up to 1, where the inverse distribution ends."""


def find_legal_choices(masks: MaskTensors, head: Head, op: Tensor, slot: Tensor, relevant: Tensor) -> Tensor:
    """The legal choices of ``head``, bool ``[N, n]``, given operations and slots ``[N]``; only choice 0
    where it is irrelevant.

    ``relevant`` is bool ``[N, 8]``, the rows of `RELEVANT` for ``op``. OP reads none of the three, SLOT no ``slot``.
    """
    rows = torch.arange(masks.op.shape[0], device=masks.op.device)
    legal = masks[head]  # the masks are in the order of the heads
    if head is Head.OP:
        return legal
    if head is Head.SLOT:
        legal = legal[rows, op]
    elif head in (Head.BLUEPRINT, Head.ALPHA_TARGET):
        legal = legal[rows, slot]
    first = torch.arange(legal.shape[-1], device=legal.device) == 0
    return torch.where(relevant[:, head, None], legal, first)


def find_open_heads(masks: MaskTensors, actions: Tensor, relevant: Tensor) -> Tensor:
    """The heads with more than one legal choice in N rows, bool ``[N, 8]``, given the ``actions`` ``[N, 8]``.

    ``relevant`` is `RELEVANT` as a tensor, bool ``[ops, 8]``.
    """
    op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
    legal = [find_legal_choices(masks, head, op, slot, relevant[op]) for head in Head]
    return torch.stack([choices.sum(-1) > 1 for choices in legal], -1)


def masked_log_softmax(logits: Tensor, legal: Tensor) -> Tensor:
    """Log-probabilities ``[N, n]`` over the legal choices, in float32 whatever the precision of the logits."""
    return logits.float().masked_fill(~legal, ILLEGAL_LOGIT).log_softmax(-1)


def mix_with_uniform(log_probs: Tensor, legal: Tensor, floor: float) -> Tensor:
    """Mix log-probabilities ``[N, n]`` with the uniform distribution, so that no legal choice is below the floor.

    p' = (1 - k g) p + g for each of k legal choices, with g = min(floor, 1 / k) (Auer et al., "The nonstochastic
    multiarmed bandit problem", 2002, where g is gamma / K). Illegal choices stay impossible, and a single one certain.
    """
    if floor == 0:
        return log_probs
    probabilities, count = log_probs.exp(), legal.sum(-1, keepdim=True).to(log_probs.dtype)
    # In this form a single legal choice keeps a probability of exactly 1.
    mixed = probabilities + count.reciprocal().clamp(max=floor) * (1 - count * probabilities)
    return torch.where(legal, mixed.log(), log_probs)


def compute_normalised_entropy(log_probs: Tensor, legal: Tensor) -> Tensor:
    """Entropy ``[N]`` divided by log(number of legal choices): in 0..1, and 0 where there is only one."""
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return entropy / legal.sum(-1).clamp(min=2).to(entropy.dtype).log()


def sample_choices(log_probs: Tensor, legal: Tensor, uniforms: Tensor) -> Tensor:
    """The first legal choices, int64 ``[N]``, whose cumulated probability exceeds ``uniforms`` ``[N]`` in [0, 1].

    Never an illegal one, however the sums round.
    """
    # Not by `cumsum`, which may sum in another order every time on a GPU; in float64, as `cumsum` does on a CPU.
    ranks = torch.arange(log_probs.shape[-1], device=log_probs.device)
    probabilities = log_probs.exp().double().unsqueeze(-2)  # [N, 1, n]
    cumulated = (probabilities * (ranks <= ranks[:, None])).sum(-1).to(log_probs.dtype)
    level = uniforms.clamp(max=LARGEST_UNIFORM).unsqueeze(-1) * cumulated[..., -1:]
    reached = legal & (cumulated > level)
    # 2 where legal and reached, 1 where only legal; argmax takes the first among equals.
    return (legal.view(torch.uint8) + reached.view(torch.uint8)).argmax(-1)


def gather_log_probs(log_probs: Tensor, choice: Tensor) -> Tensor:
    """Log-probability ``[N]`` of the choice ``[N]`` under ``[N, n]``."""
    return log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


DETAILS = (Head.BLEND, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE)


class Candidates(NamedTuple):
    """The distributions that N rows of one head choose from."""

    preferences: Tensor
    """Log-probabilities ``[N, n]`` before they are raised to the head's floor."""
    log_probs: Tensor
    """Log-probabilities ``[N, n]`` with the floor."""
    legal: Tensor
    """bool ``[N, n]``."""


Choose = Callable[[Head, Candidates], Tensor]
"""Picks choices int64 ``[N]``: sampled, greedy, or those of stored actions."""


class HeadOutputs(NamedTuple):
    """The actions of N rows and the distributions they were chosen from; tuples hold one entry per `Head`."""

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
        self.query = make_linear(context, candidate, generator, gain)
        self.scale = 1.0 / math.sqrt(candidate)

    def forward(self, context: Tensor, candidates: Tensor) -> Tensor:
        """Context ``[N, C]`` and candidates ``[N, n, W]`` to logits ``[N, n]``."""
        return torch.bmm(candidates, self.query(context).unsqueeze(-1)).squeeze(-1) * self.scale


class ActionHeads(nn.Module):
    """Masked heads on the recurrent state and the slot tokens.

    The heads ``closed``, which always have one legal choice, have no parameters and take that choice.
    """

    relevant: Tensor

    def __init__(
        self, spec: ObservationSpec, settings: PolicySettings, closed: frozenset[Head], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.present = tuple(head for head in Head if head not in closed)
        """The heads that have parameters."""
        hidden, width, gain = settings.hidden, settings.width, settings.head_gain
        self.floors = settings.probability_floor.by_head
        sizes = count_choices(1, 1)  # only SLOT and BLUEPRINT depend on the numbers, and they are pointers
        self.register_buffer("relevant", torch.from_numpy(RELEVANT.copy()), persistent=False)  # [ops, heads]
        # Embeddings of the choices that later heads depend on.
        self.op_embedding = make_embedding(len(Op), width, generator)
        self.blueprint_encoder = make_linear(spec.blueprints, width, generator, RELU_GAIN)
        # Drawn for all heads, so that the first weights of the others do not depend on which are closed.
        details = make_linear(hidden + 3 * width, width, generator, RELU_GAIN)
        # One output per head: linear for fixed choices, pointers to slots and blueprints.
        outputs = {
            Head.OP: make_linear(hidden, len(Op), generator, gain),
            Head.SLOT: Pointer(hidden + width, width, gain, generator),
            Head.BLUEPRINT: Pointer(hidden + width, width, gain, generator),
            **{head: make_linear(width, sizes[head], generator, gain) for head in DETAILS},
        }
        self.details = None if closed.issuperset(DETAILS) else details
        self.outputs = nn.ModuleDict({head.name: outputs[head] for head in self.present})

        # The learned weights of advice, by head; none without advice.
        weights: dict[Head, float] = {}
        if (advice := settings.advice) is not None:
            weights = {Head.OP: advice.op, Head.SLOT: advice.slot, Head.BLUEPRINT: advice.blueprint}
        self.advised = nn.ParameterDict({head.name: torch.tensor(weight) for head, weight in weights.items()})
        # The prior of the operations is the bias of their head.
        op_bias = self.outputs[Head.OP.name].get_parameter("bias")
        op_bias.data.copy_(torch.tensor(settings.op_prior.by_op))

    def output_parameters(self, head: Head) -> list[nn.Parameter]:
        """The parameters of this head that no other head shares."""
        weights = [self.advised[head.name]] if head.name in self.advised else []
        return [*self.outputs[head.name].parameters(), *weights]

    def forward(
        self,
        memory: Tensor,
        tokens: Tensor,
        observation: Observation,
        advice: Advice | None,
        masks: MaskTensors,
        choose: Choose,
    ) -> HeadOutputs:
        """Choose with the heads in order, from ``memory`` ``[N, H]`` and ``tokens`` ``[N, S, W]``, by ``choose``.

        The observation is normalised; ``advice`` is of the same N rows, None if the settings have no advice.
        """
        rows = torch.arange(memory.shape[0], device=memory.device)
        actions, log_probs, legals = list[Tensor](), list[Tensor](), list[Tensor]()

        def choose_from(head: Head, logits: Tensor, legal: Tensor, advised: Tensor | None = None) -> Tensor:
            if advised is not None:
                logits = logits + self.advised[head.name] * advised
            preferences = masked_log_softmax(logits, legal)
            floored = mix_with_uniform(preferences, legal, self.floors[head])
            actions.append(choose(head, Candidates(preferences, floored, legal)))
            log_probs.append(floored)
            legals.append(legal)
            return actions[-1]

        # The operation, from the memory.
        logits = self.outputs[Head.OP.name](memory)
        op = choose_from(Head.OP, logits, masks.op, advice and advice.ops)
        relevant = self.relevant[op]  # [N, heads]
        op_vector = self.op_embedding(op)

        # The slot: a pointer to one of the slot tokens.
        logits = self.outputs[Head.SLOT.name](torch.cat((memory, op_vector), -1), tokens)
        legal = find_legal_choices(masks, Head.SLOT, op, op, relevant)
        slot = choose_from(Head.SLOT, logits, legal, advice and advice.slots)
        token = tokens[rows, slot]

        # The blueprint: a pointer to one of the blueprints in that slot.
        blueprints = F.relu(self.blueprint_encoder(observation.blueprints[rows, slot]))  # [N, K, W]
        logits = self.outputs[Head.BLUEPRINT.name](torch.cat((memory, token), -1), blueprints)
        legal = find_legal_choices(masks, Head.BLUEPRINT, op, slot, relevant)
        blueprint = choose_from(Head.BLUEPRINT, logits, legal, advice and advice.blueprints[rows, slot])
        blueprint_vector = blueprints[rows, blueprint] * relevant[:, Head.BLUEPRINT, None]

        # How the seed blends in, all from one hidden layer on the choices so far.
        details: Tensor | None = None
        if self.details is not None:
            details = F.relu(self.details(torch.cat((memory, op_vector, token, blueprint_vector), -1)))
        for head in DETAILS:
            legal = find_legal_choices(masks, head, op, slot, relevant)
            logits = self.outputs[head.name](details) if head in self.present else memory.new_zeros(legal.shape)
            choose_from(head, logits, legal)
        return HeadOutputs(torch.stack(actions, -1), tuple(log_probs), tuple(legals))
