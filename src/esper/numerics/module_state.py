"""Keep what a pass through a network may change: modes, buffers, and the state of torch's random generators."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


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


@contextmanager
def keep_modes(network: nn.Module) -> Generator[None]:
    """Restore the training or evaluation mode of each module of ``network`` after the block."""
    modes = [(module, module.training) for module in network.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
