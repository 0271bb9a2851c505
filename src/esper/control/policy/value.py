"""The state value, predicted in standardised units and reported in the units of returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.policy.layers import RELU_GAIN, linear
from esper.control.policy.normaliser import RunningMoments

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
