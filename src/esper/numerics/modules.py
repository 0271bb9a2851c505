"""Modules: layers for one network or many of one shape at once, and what a pass through a network may change.

Layers are initialised from an explicit generator: weights are He-uniform (He et al., 2015, arXiv:1502.01852) and biases
are zero. Torch's global generator is not used.
"""

import copy
import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.errors import EsperError

T = TypeVar("T")


class Stackable(nn.Module):
    """A module whose ``forward`` also computes R modules of its shape at once, without `torch.func.vmap`.

    With stacked parameters and buffers ``[R, *shape]`` and inputs ``[R, B, ...]`` it returns ``[R, B, ...]``: it works
    on the last axes only. For small modules vmap would cost more than the computation. Its forward reads parameters
    and buffers as attributes, and must not call ``parameters()``.
    """


def linear(weight: Tensor, columns: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply ``weight [..., O, C]`` to each column: ``[..., C, N]`` -> ``[..., O, N]``, plus ``bias [..., O]``.

    There may be one axis before the others.
    """
    # Not matmul, which takes both ranks but doubles the overhead of small products, most of all in the backward pass.
    stacked = weight.dim() == 3
    if bias is None:
        return torch.bmm(weight, columns) if stacked else torch.mm(weight, columns)
    column = bias.unsqueeze(-1)
    return torch.baddbmm(column, weight, columns) if stacked else torch.addmm(column, weight, columns)


def initialise(layer: nn.Linear | nn.Conv1d | nn.Conv2d, generator: torch.Generator) -> None:
    """Initialise a layer that was built on the device "meta": elsewhere it would draw from the global generator."""
    # He-uniform: the bound is sqrt(6 / fan-in).
    shape = layer.weight.shape
    bound = math.sqrt(6 / shape[1:].numel())
    layer.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))
    layer.bias = nn.Parameter(torch.zeros(shape[0]))


class Linear(nn.Linear, Stackable):
    """A linear layer on features ``[..., B, C]``."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, device="meta")
        initialise(self, generator)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return linear(self.weight, input.mT, self.bias).mT


class TokenLinear(Linear):
    """A linear layer on tokens ``[..., B, T, C]`` that computes with the batch innermost in memory.

    This makes narrow layers several times faster on a CPU: one product with a long contiguous axis, and sums over
    tokens and biases along contiguous rows. Views keep the order of axes of `nn.Linear`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        columns = input.transpose(-3, -1)  # [..., C, T, B]
        outputs = linear(self.weight, columns.flatten(-2), self.bias)
        return outputs.view(*outputs.shape[:-1], *columns.shape[-2:]).transpose(-3, -1)


class Conv1d(nn.Conv1d, Stackable):
    """A convolution on signals ``[..., B, C, L]``, padded by half its kernel.

    It computes with the batch innermost in memory, as `TokenLinear` does: each output's receptive field is copied into
    a column, and the convolution becomes one matrix product.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=kernel // 2, device="meta")
        initialise(self, generator)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        (kernel,), (stride,) = self.kernel_size, self.stride
        signals = F.pad(input.movedim(-3, -1), (0, 0, kernel // 2, kernel // 2))  # [..., C, L, B]
        windows = signals.unfold(-2, kernel, stride).movedim(-1, -3)  # [..., C, K, L', B]
        columns = windows.flatten(-4, -3).flatten(-2)
        outputs = linear(self.weight.flatten(-2), columns, self.bias)
        return outputs.view(*outputs.shape[:-1], *windows.shape[-2:]).movedim(-1, -3)


# What a pass may change: modes, buffers, and the state of torch's random generators.


@contextmanager
def keep_modes(network: nn.Module) -> Generator[None]:
    """Restore the training or evaluation mode of each module of ``network`` after the block."""
    modes = [(module, module.training) for module in network.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def keep_buffers(network: nn.Module) -> Generator[None]:
    """Undo changes of the buffers of ``network`` after the block.

    They are other tensors within the block, so a pass from before it can still be differentiated after it.
    """
    buffers = [(module, *named) for module in network.modules() for named in module.named_buffers(recurse=False)]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


@contextmanager
def keep_attributes(network: nn.Module) -> Generator[None]:
    """Restore the plain attributes of each module of ``network``, such as a hidden state, after the block."""
    before = [(module, dict(vars(module))) for module in network.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def keep_generators(network: nn.Module, others: Sequence[torch.Generator] = ()) -> Generator[None]:
    """Restore the state of torch's random generators, and of ``others``, after the block."""
    states = [(generator, generator.get_state()) for generator in (*global_generators(network), *others)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def global_generators(network: nn.Module) -> list[torch.Generator]:
    """Torch's own random generators: of the CPU, and of all CUDA devices in use by ``network``."""
    devices = {parameter.device.index for parameter in network.parameters() if parameter.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[device] for device in sorted(devices))]


def copy_with(module: nn.Module, value: T, error: type[EsperError], shared: Iterable[object] = ()) -> T:
    """A deep copy of ``value``, the module or what contains it, in which ``shared`` objects are not copied."""
    # Layers with the old `torch.nn.utils.weight_norm` or `spectral_norm` keep a weight that they compute before each
    # pass. The copy gets its values without the graph.
    memo: dict[int, Any] = {
        id(attribute): attribute.detach().clone()
        for part in module.modules()
        for attribute in vars(part).values()
        if isinstance(attribute, Tensor) and not attribute.is_leaf
    }
    try:
        return copy.deepcopy(value, memo | {id(part): part for part in shared})
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as failure:
        name, reason = type(module).__name__, str(failure).strip().partition("\n")[0].partition(".  ")[0]
        raise error(
            f"{name} cannot be copied ({reason}): let modules keep no locks, open files or generators as attributes, "
            "and no results of a pass in lists"
        ) from failure
