"""The examples of all networks as one batch, for hosts whose parameters are all in linear layers and convolutions.

Only those layers must know whose examples they see; whatever else such a host does with a batch, it does example by
example. So it runs once, as it is, at any number of networks, and without the cost of `torch.func.vmap`. A merged batch
``[N * E, ...]`` holds the first example of every network, then the second of every network, and so on: in this order a
convolution's channels of all networks already lie side by side, and one grouped convolution serves all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from esper.stacking import linear
from esper.training.functional import Functional

_NETWORKS, _EXAMPLES = 2, 3
"""Of the trial whether a host can merge."""


def merged(stacked: Tensor) -> Tensor:
    """``[E, N, ...]`` as one batch ``[N * E, ...]``."""
    return stacked.transpose(0, 1).flatten(0, 1)


def separated(batch: Tensor, networks: int) -> Tensor:
    """A merged batch ``[N * E, ...]`` as ``[E, N, ...]``, a view."""
    return batch.reshape(-1, networks, *batch.shape[1:]).transpose(0, 1)


def enable_merging(host: nn.Module) -> None:
    """Let the host's layers take merged batches when they are given stacked parameters; otherwise nothing changes."""
    for layer in host.modules():
        if type(layer) in _FORWARD:
            layer.forward = partial(_FORWARD[type(layer)], layer)


def can_merge(host: nn.Module, example_input: Tensor) -> bool:
    """Whether ``host`` computes merged batches rightly in a `Functional`, once `enable_merging` has seen it.

    It must have no buffers, and a trial must agree with a vmap over networks. A host fails it that has parameters
    elsewhere than in the layers that can merge, that asks for them (``next(self.parameters())``), or that mixes the
    examples of a batch, as normalisation over it does.
    """
    if any(True for _ in host.buffers()):
        return False
    return all(_agrees(host, example_input, training) for training in (True, False))


def _agrees(host: nn.Module, example_input: Tensor, training: bool) -> bool:
    plain = copy.deepcopy(host).to("cpu", torch.float64).train(training)
    merging = copy.deepcopy(plain)
    enable_merging(merging)
    # Its own weights would not do, nor the example: zeros, or equal networks, hide whose are whose.
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {name: drawn(_NETWORKS, *parameter.shape) for name, parameter in plain.named_parameters()}
    inputs = drawn(_NETWORKS, _EXAMPLES, *example_input.shape[1:])

    def call(parameters: dict[str, Tensor], batch: Tensor) -> Tensor:
        return functional_call(plain, parameters, (batch,))

    with torch.no_grad():
        try:
            expected = vmap(call)(weights, inputs)
            found = separated(Functional(merging)(weights, {}, merged(inputs)), _NETWORKS)
        except (RuntimeError, ValueError, StopIteration):
            return False
    return found.shape == expected.shape and torch.allclose(found, expected)


def _linear(layer: nn.Linear, features: Tensor) -> Tensor:
    """Features ``[N * E, ..., inputs]`` to ``[N * E, ..., outputs]``."""
    weight: Tensor = layer.weight
    if weight.dim() == _LINEAR_RANK:
        return nn.Linear.forward(layer, features)
    own = separated(features, len(weight))  # [E, N, ..., inputs]
    outputs = linear(weight, own.flatten(1, -2).mT, layer.bias).mT
    return merged(outputs.reshape(*own.shape[:-1], -1))


def _convolution(
    layer: nn.Conv1d | nn.Conv2d, features: Tensor, *, alone: Callable[..., Tensor], grouped: Callable[..., Tensor]
) -> Tensor:
    """Features ``[N * E, inputs, ...]`` to ``[N * E, outputs, ...]``."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == features.dim():
        return alone(layer, features)
    networks = len(weight)
    channels = features.reshape(-1, networks * features.shape[1], *features.shape[2:])  # [N, E * inputs, ...]
    outputs = grouped(
        channels,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        layer.stride,
        layer.padding,
        layer.dilation,
        networks * layer.groups,
    )
    return outputs.reshape(features.shape[0], -1, *outputs.shape[2:])


_LINEAR_RANK = 2
"""Axes of one linear layer's weight."""
_FORWARD: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv1d: partial(_convolution, alone=nn.Conv1d.forward, grouped=F.conv1d),
    nn.Conv2d: partial(_convolution, alone=nn.Conv2d.forward, grouped=F.conv2d),
}
"""By exact type: what a subclass does is its own affair."""
