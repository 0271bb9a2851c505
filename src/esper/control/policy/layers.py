"""Layers initialised from an explicit generator, and running moments that change only in an explicit update.

The policy normalises inside its forward pass, so a rollout stores raw observations, and an update computes with exactly
the inputs of acting. The statistics are buffers: frozen while a rollout is collected and learned from, updated once
afterwards, saved and moved between devices with the weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from esper.engine.observation import Observation, ObservationSpec

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

    A feature that never varied in training, or not for thousands of updates, reads 0: another value elsewhere would
    drive a policy that has not learned to use it to one of its bounds.
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
