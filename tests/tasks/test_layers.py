"""Layers that compute stacks compute what torch's own do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from esper.tasks.layers import Conv1d


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_convolution_equals_torchs_alone_and_in_a_stack(kernel: int, stride: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Conv1d(3, 4, kernel, stride, generator).double()
    layer.bias.data.uniform_(generator=generator)
    signals = torch.randn(2, 5, 3, 10, generator=generator, dtype=torch.float64)
    expected = F.conv1d(signals.flatten(0, 1), layer.weight, layer.bias, stride, kernel // 2).unflatten(0, (2, 5))
    torch.testing.assert_close(layer(signals[0]), expected[0])
    weights = {name: torch.stack([own, -own]) for name, own in layer.named_parameters()}
    stacked = torch.func.functional_call(layer, weights, (signals,))
    torch.testing.assert_close(stacked, torch.stack([expected[0], -expected[1]]))
